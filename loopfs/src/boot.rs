//! Which boot of the machine it is.

use crate::error::{Context, Result};

/// Which boot this is: `/proc/sys/kernel/random/boot_id` (random(4)).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Boot(pub(crate) String);

impl std::fmt::Display for Boot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl Boot {
    pub(crate) fn current() -> Result<Self> {
        const PATH: &str = "/proc/sys/kernel/random/boot_id";
        Ok(Self(std::fs::read_to_string(PATH).context("read", PATH)?.trim().to_owned()))
    }
}
