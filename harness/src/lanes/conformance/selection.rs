//! The specs of a run of the lane, in phases.

use std::time::Duration;

use testvm_cluster::conformance::Specs;

use super::list::SpecList;

/// The outermost container of the specs, by the beginning of its text.
pub(super) const CONTAINER: &str = "External Storage";

/// The number of specs that run concurrently. Five did not slow each other down on two emulated processors.
const PROCESSES: usize = 5;
/// The label of specs that tolerate no others beside them, and that of specs that break the cluster.
const ALONE: &str = "Serial || Disruptive";
const BESIDE_OTHERS: &str = "!Serial && !Disruptive";

const PARALLEL_TIMEOUT: Duration = Duration::from_secs(90 * 60);
const SERIAL_TIMEOUT: Duration = Duration::from_secs(60 * 60);
const QUICK_TIMEOUT: Duration = Duration::from_secs(15 * 60);

/// The selected specs.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(in crate::lanes) enum Selection {
    /// All specs of the suite.
    All,
    /// One spec of each suite and mode.
    Quick,
    /// The specs whose texts contain one of these.
    Only(Vec<String>),
}

impl Selection {
    /// Returns the selection of these options.
    pub(in crate::lanes) fn new(quick: bool, only: &[String]) -> Selection {
        match (quick, only) {
            (true, _) => Selection::Quick,
            (false, []) => Selection::All,
            (false, only) => Selection::Only(only.to_owned()),
        }
    }

    /// Returns the phases in their order.
    pub(super) fn phases(&self, list: &SpecList) -> Vec<Phase> {
        let focus = match self {
            Selection::All => vec![CONTAINER.to_owned()],
            Selection::Quick => {
                list.quick.iter().map(|text| format!("{CONTAINER}.*{}$", literal(text))).collect()
            }
            Selection::Only(texts) => {
                texts.iter().map(|text| format!("{CONTAINER}.*{}", literal(text))).collect()
            }
        };
        let skip: Vec<String> = list.not_started.iter().map(|specs| literal(&specs.text)).collect();
        let phase = |name, processes, labels: &str, timeout| Phase {
            name,
            specs: Specs {
                processes,
                focus: focus.clone(),
                skip: skip.clone(),
                labels: labels.to_owned(),
                timeout,
            },
        };
        match self {
            Selection::Quick => vec![phase("quick", PROCESSES, BESIDE_OTHERS, QUICK_TIMEOUT)],
            Selection::All | Selection::Only(_) => vec![
                phase("parallel", PROCESSES, BESIDE_OTHERS, PARALLEL_TIMEOUT),
                phase("serial", 1, ALONE, SERIAL_TIMEOUT),
            ],
        }
    }
}

/// Specs that one run of the runner selects.
#[derive(Clone, Debug)]
pub(super) struct Phase {
    /// Its name in the report, and that of the directory of its logs.
    pub(super) name: &'static str,
    pub(super) specs: Specs,
}

/// Returns a regular expression of Go that matches the text itself. The runner matches the text of a spec with that of the
/// suite before it.
fn literal(text: &str) -> String {
    format!(r"\Q{text}\E")
}
