//! Counts and times the attempts to create, expand and delete volumes.

use std::time::Instant;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use crate::error::Error;

/// Creating a directory volume takes milliseconds. Images take as long as allocating their blocks, copies as long as their files.
const BUCKETS: [f64; 12] = [0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0, 120.0, 600.0];

type Labels<const COUNT: usize> = [(&'static str, &'static str); COUNT];

/// The metrics of all attempts since the process started.
#[derive(Clone, Debug)]
pub(crate) struct Operations {
    ended: Family<Labels<3>, Counter>,
    took: Family<Labels<2>, Histogram, fn() -> Histogram>,
}

impl Default for Operations {
    fn default() -> Self {
        Operations {
            ended: Family::default(),
            took: Family::new_with_constructor(|| Histogram::new(BUCKETS)),
        }
    }
}

impl Operations {
    /// Records the end of an attempt to `provision`, `resize` or `delete` that began at `begun`. A conflict is no failure: the provisioner
    /// retries immediately.
    pub(crate) fn ended(&self, operation: &'static str, begun: Instant, outcome: Result<(), &Error>) {
        let (result, reason) = match outcome {
            Ok(()) => ("success", ""),
            Err(error) if error.is_conflict() => ("conflict", error.reason()),
            Err(error) => ("failure", error.reason()),
        };
        let operation = ("operation", operation);
        self.ended.get_or_create(&[operation, ("result", result), ("reason", reason)]).inc();
        let took = self.took.get_or_create(&[operation, ("result", result)]);
        took.observe(begun.elapsed().as_secs_f64());
    }

    pub(crate) fn register(&self, registry: &mut Registry) {
        let help = "Attempts to create, expand and delete volumes, by result and reason";
        registry.register("operations", help, self.ended.clone());
        let help = "Duration of the attempts, by result";
        registry.register_with_unit("operation_duration", help, Unit::Seconds, self.took.clone());
    }
}

#[cfg(test)]
mod tests {
    use loopfs::ErrorKind;
    use loopfs::volume_store::VolumeId;
    use service::documentation;

    use super::*;
    use crate::store::driver::StorageError;
    use crate::testing::fake_store;

    #[test]
    fn attempts_are_counted_by_reason() {
        let operations = Operations::default();
        let full = Error::Storage(StorageError::Volume(fake_store::error(ErrorKind::NoSpace, "full")));
        let taken = Error::InFlight(VolumeId::parse("v").unwrap());
        operations.ended("provision", Instant::now(), Ok(()));
        operations.ended("provision", Instant::now(), Err(&full));
        operations.ended("provision", Instant::now(), Err(&full));
        operations.ended("delete", Instant::now(), Err(&taken));
        let mut registry = Registry::default();
        operations.register(&mut registry);
        let text = documentation::page(&registry);
        for line in [
            r#"operations_total{operation="provision",result="success",reason=""} 1"#,
            r#"operations_total{operation="provision",result="failure",reason="NoSpace"} 2"#,
            r#"operations_total{operation="delete",result="conflict",reason="InFlight"} 1"#,
            r#"operation_duration_seconds_count{operation="provision",result="failure"} 2"#,
        ] {
            assert!(text.contains(&format!("\n{line}\n")), "{line} is not in {text}");
        }
    }
}
