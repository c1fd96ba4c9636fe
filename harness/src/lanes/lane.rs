//! The table of the lanes, ordered by cost: the first runs on any machine in minutes, the last takes hours.

use anyhow::Result;
use futures::future::LocalBoxFuture;
use testvm::report::Report;
use testvm::session::Session;

use super::kernel::Kernels;
use super::{apiserver, clusters, conformance, docker, kernel, mutants, sanity, second_driver, unit};
use crate::e2e::{self, Set};
use crate::listing::Line;

/// A lane, or a part of a lane.
#[derive(Debug)]
pub(super) struct Lane {
    /// The name of the lane on the command line.
    pub(super) lane: &'static str,
    /// The name of the part, which is also that of the directory of its reports.
    pub(super) part: Option<&'static str>,
    /// What it checks, in one line.
    about: &'static str,
    needs: &'static str,
    /// The others take long, or changes of loopfs do not affect their result. They run only if --lane selects them.
    pub(super) runs_in_ci: bool,
    /// It starts a cluster or a machine with one, and waits for other runs of this checkout that do.
    pub(super) on_cluster: bool,
    takes: &'static [LaneOption],
    pub(super) run: for<'a> fn(&'a Session, &'a LaneArgs) -> LocalBoxFuture<'a, Result<Report>>,
}

/// The options that only some lanes take.
#[derive(Debug, clap::Args)]
pub(super) struct LaneArgs {
    /// In the lanes kernel, apiserver, docker and conformance, run only the tests whose names contain this, without power
    /// cuts. In the lane extended, run only the part of this name. May be given more than once.
    #[arg(long, value_name = "TEXT")]
    pub(super) only: Vec<String>,
    /// In the conformance lane, run only one spec of each suite and mode, and no slow one.
    #[arg(long, conflicts_with = "only")]
    pub(super) quick: bool,
    #[command(flatten)]
    pub(super) e2e: e2e::Args,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum LaneOption {
    Kubernetes,
    Kernel,
    Only,
    Quick,
    Stories,
}

impl LaneOption {
    pub(super) fn names(self) -> &'static str {
        match self {
            LaneOption::Kubernetes => "--kubernetes",
            LaneOption::Kernel => "--kernel",
            LaneOption::Only => "--only",
            LaneOption::Quick => "--quick",
            LaneOption::Stories => "the options of e2e and its nodes",
        }
    }

    /// Returns the options that a command line has.
    pub(super) fn given(args: &LaneArgs) -> Vec<LaneOption> {
        let all = [
            (LaneOption::Kubernetes, !args.e2e.kubernetes().words().is_empty()),
            (LaneOption::Kernel, args.e2e.kernel().is_some()),
            (LaneOption::Only, !args.only.is_empty()),
            (LaneOption::Quick, args.quick),
            (LaneOption::Stories, args.e2e.is_of_e2e_only()),
        ];
        all.into_iter().filter(|(_, is_given)| *is_given).map(|(option, _)| option).collect()
    }
}

impl Lane {
    /// Returns the name of the lane, and that of the part behind it.
    pub(super) fn title(&self) -> String {
        std::iter::once(self.lane).chain(self.part).collect::<Vec<_>>().join(" ")
    }

    /// Returns the name of the part, or that of a lane without parts.
    pub(super) fn suite(&self) -> &'static str {
        self.part.unwrap_or(self.lane)
    }

    /// Returns `true` if the option affects the lane. A part is selected by --only.
    pub(super) fn takes(&self, option: LaneOption) -> bool {
        self.takes.contains(&option) || option == LaneOption::Only && self.part.is_some()
    }
}

fn stories(session: &Session, args: e2e::Args) -> LocalBoxFuture<'_, Result<Report>> {
    Box::pin(async move { e2e::run(session, &args).await })
}

/// A lane of CI without a cluster and options.
const CI: Lane = Lane {
    lane: "",
    part: None,
    about: "",
    needs: MACHINE,
    runs_in_ci: true,
    on_cluster: false,
    takes: &[],
    run: |_, _| Box::pin(async { anyhow::bail!("the table has no function for this lane") }),
};
/// A part of the lane extended on a cluster.
const PART: Lane =
    Lane { lane: EXTENDED, needs: CLUSTER, runs_in_ci: false, on_cluster: true, takes: KUBERNETES, ..CI };

const MACHINE: &str = "a virtual machine (QEMU)";
const CLUSTER: &str = "a cluster with one node (QEMU, Go)";
/// The programs of Kubernetes can be selected. The part versions runs all releases.
const KUBERNETES: &[LaneOption] = &[LaneOption::Kubernetes];

pub(super) const LANES: &[Lane] = &[
    Lane {
        lane: "unit",
        about: "format, lints, unit tests, dependencies, documentation, without root",
        needs: "Go and promtool",
        run: |session, _| Box::pin(unit::run(session)),
        ..CI
    },
    Lane {
        lane: "apiserver",
        about: "the provisioner and the Helm chart with a real API server, controller manager and scheduler",
        needs: "a control plane without nodes (Go)",
        takes: &[LaneOption::Kubernetes, LaneOption::Only],
        run: |session, args| {
            Box::pin(async { apiserver::run(session, args.e2e.kubernetes().minor(), &args.only).await })
        },
        ..CI
    },
    Lane {
        lane: "kernel",
        about: "loopfs and csi as root on two kernels with XFS project quotas, where they differ on three, and power cuts",
        takes: &[LaneOption::Kernel, LaneOption::Only],
        run: |session, args| {
            let kernels = args.e2e.kernel().map_or(Kernels::OfTheSeed, Kernels::One);
            Box::pin(session.until_cancelled(kernel::run(session, kernels, &args.only)))
        },
        ..CI
    },
    Lane {
        lane: "sanity",
        about: "csi-sanity, the conformance suite of the Container Storage Interface",
        needs: "a virtual machine (QEMU, Go)",
        takes: &[LaneOption::Kernel],
        run: |session, args| Box::pin(session.until_cancelled(sanity::run(session, args.e2e.kernel()))),
        ..CI
    },
    Lane {
        lane: "docker",
        about: "the driver's image in a Docker engine: its service, and containers in which it refuses to start",
        needs: "a virtual machine with Docker (QEMU)",
        takes: &[LaneOption::Only],
        run: |session, args| Box::pin(session.until_cancelled(docker::run(session, &args.only))),
        ..CI
    },
    Lane {
        lane: "e2e",
        about: "the stories below that are not long and have no programs of other projects",
        needs: CLUSTER,
        on_cluster: true,
        takes: &[LaneOption::Kubernetes, LaneOption::Kernel, LaneOption::Stories],
        run: |session, args| stories(session, args.e2e.clone().with_unnamed(Set::Short)),
        ..CI
    },
    Lane {
        lane: "conformance",
        about: "the storage tests of Kubernetes (External.Storage)",
        needs: CLUSTER,
        runs_in_ci: false,
        on_cluster: true,
        takes: &[LaneOption::Kubernetes, LaneOption::Only, LaneOption::Quick],
        run: |session, args| {
            Box::pin(async {
                let selection = conformance::Selection::new(args.quick, &args.only);
                conformance::run(session, args.e2e.kubernetes().minor(), &selection).await
            })
        },
        ..CI
    },
    Lane {
        part: Some("long-stories"),
        about: "the stories that take longest",
        run: |session, args| {
            stories(session, e2e::Args::of(Set::Long, args.e2e.kubernetes()).with_reports("long-stories"))
        },
        ..PART
    },
    Lane {
        part: Some("other-projects"),
        about: "the stories with programs of other projects",
        run: |session, args| {
            stories(
                session,
                e2e::Args::of(Set::OtherProjects, args.e2e.kubernetes()).with_reports("other-projects"),
            )
        },
        ..PART
    },
    Lane {
        part: Some("self-check"),
        about: "each change of `cargo harness e2e --break`, which its story must notice and name",
        needs: "three clusters (QEMU, Go), one after the other",
        run: |session, args| {
            let broken = clusters::self_check(args.e2e.kubernetes());
            Box::pin(clusters::run(session, "self-check", broken))
        },
        ..PART
    },
    Lane {
        part: Some("kernels"),
        about: "all tests of the lane kernel on each kernel, with a new seed in each run",
        needs: MACHINE,
        on_cluster: false,
        takes: &[],
        run: |session, _| Box::pin(session.until_cancelled(kernel::run(session, Kernels::All, &[]))),
        ..PART
    },
    Lane {
        part: Some("mutants"),
        about: "changes of the functions that decide, by cargo-mutants: a unit test must notice each",
        needs: "some hours of the compiler",
        on_cluster: false,
        takes: &[],
        run: |session, _| Box::pin(mutants::run(session)),
        ..PART
    },
    Lane {
        part: Some("node"),
        about: "the stories of the node on six kinds of nodes: kubelet, losetup, tools, disk of the kubelet",
        needs: "a cluster for each kind of node (QEMU, Go), one after the other",
        takes: &[LaneOption::Kubernetes, LaneOption::Kernel],
        run: |session, args| {
            let kinds = clusters::kinds_of_nodes(args.e2e.kubernetes(), args.e2e.kernel());
            Box::pin(clusters::run(session, "node", kinds))
        },
        ..PART
    },
    Lane {
        part: Some("versions"),
        about: "the stories of the node on each release of Kubernetes, and with each kernel",
        needs: "a cluster for each version (QEMU, Go), one after the other",
        takes: &[],
        run: |session, _| {
            Box::pin(async { clusters::run(session, "versions", clusters::versions(session)?).await })
        },
        ..PART
    },
    Lane {
        part: Some("kind"),
        about: "the driver on a cluster of kind, as the README installs it, and the commands of the documents",
        needs: "a virtual machine with Docker (QEMU, Go)",
        run: |session, args| {
            let args = e2e::Args::of(Set::Main, args.e2e.kubernetes()).with_reports("kind");
            stories(session, args.on_kind())
        },
        ..PART
    },
    Lane {
        part: Some("second-driver"),
        about: "local-path-provisioner, for which the checks of the capacity must fail",
        run: |session, args| {
            Box::pin(async { second_driver::run(session, args.e2e.kubernetes().minor()).await })
        },
        ..PART
    },
    Lane {
        part: Some("image"),
        about: "the image for a registry, built from two checkouts: same bytes, and its programs start",
        needs: "compilers and an emulator for each platform",
        on_cluster: false,
        takes: &[],
        run: |session, _| Box::pin(session.until_cancelled(release::check_image(session))),
        ..PART
    },
];

const EXTENDED: &str = "extended";

/// Returns the names of the lanes.
pub(super) fn names() -> Vec<&'static str> {
    let mut names: Vec<&str> = LANES.iter().map(|lane| lane.lane).collect();
    names.dedup();
    names
}

/// Returns a line about each lane and each part.
pub(crate) fn lines() -> impl Iterator<Item = Line> {
    LANES.chunk_by(|a, b| a.lane == b.lane).flat_map(|parts| {
        let all = (parts.len() > 1).then(|| Line {
            kind: "lane",
            name: parts[0].lane.to_owned(),
            about: format!("{} parts, of which --only PART runs one (only if it is named)", parts.len()),
            needs: "",
            estimate: "",
        });
        let line = |lane: &Lane| {
            let named = if lane.runs_in_ci || lane.part.is_some() { "" } else { " (only if it is named)" };
            Line {
                kind: "lane",
                name: lane.title(),
                about: format!("{}{named}", lane.about),
                needs: lane.needs,
                estimate: "",
            }
        };
        all.into_iter().chain(parts.iter().map(line))
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn lanes_and_parts_have_different_names() {
        let parts = LANES.iter().filter_map(|lane| lane.part);
        let all: Vec<&str> = names().into_iter().chain(parts).collect();
        assert_eq!(all.len(), all.iter().collect::<BTreeSet<_>>().len(), "{all:?}");
    }

    #[test]
    fn a_release_runs_all_lanes() {
        let manual = include_str!("../../../docs/testing.md");
        let (_, release) =
            manual.split_once("To make a release:").expect("testing.md has steps of a release");
        let mut others: Vec<&str> =
            LANES.iter().filter(|lane| !lane.runs_in_ci).map(|lane| lane.lane).collect();
        others.dedup();
        let of_others = format!("cargo harness test --lane {}", others.join(" --lane "));
        let commands: Vec<&str> = release.split('`').skip(1).step_by(2).collect();
        for command in ["cargo harness test", of_others.as_str()] {
            assert!(commands.contains(&command), "no step runs {command:?}: {commands:?}");
        }
    }
}
