//! What a Prometheus server is told. The names are listed in README.md, which a test compares with what is served.

mod findings;
mod operations;
mod sample;

pub(crate) use self::{
    findings::{Findings, LatestFindings},
    operations::{Operation, Operations},
    sample::{Sample, register},
};
