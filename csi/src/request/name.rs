//! The id of a volume or snapshot, derived from the name that the orchestrator suggests.

use std::fmt::Write;

use loopfs::volume_store::{SnapshotId, VolumeId};
use sha2::{Digest, Sha256};

use super::field::Result;
use crate::error::InvalidRequest;

const FIELD: &str = "name";

/// The maximum length of a string, in bytes, according to the specification.
const MAX_NAME_LEN: usize = 128;

/// The prefix of an id that is derived from a name which is not a valid id.
const DERIVED: &str = "name-";

/// Returns the id of the volume with this name. The same name has the same id in every process, and two names never
/// share one. The id is the name itself, or the hash of a name that is not a valid id or looks like such a hash.
pub(super) fn volume_id(name: &str) -> Result<VolumeId> {
    parse_name(name, VolumeId::parse)
}

/// Returns the id of the snapshot with this name, by the same rule.
pub(super) fn snapshot_id(name: &str) -> Result<SnapshotId> {
    parse_name(name, SnapshotId::parse)
}

fn parse_name<Id>(name: &str, parse: impl Fn(&str) -> loopfs::Result<Id>) -> Result<Id> {
    let invalid = |problem: String| Err(InvalidRequest::new(FIELD, problem));
    if name.is_empty() {
        return invalid("must not be empty".to_owned());
    }
    if name.len() > MAX_NAME_LEN {
        return invalid(format!("must not be longer than {MAX_NAME_LEN} bytes, but has {}", name.len()));
    }
    if let Some(character) = name.chars().find(|character| is_forbidden(*character)) {
        return invalid(format!("must not contain {character:?}"));
    }
    match parse(name) {
        Ok(id) if !is_derived(name) => Ok(id),
        _ => parse(&derived(name)).map_err(|error| InvalidRequest::new(FIELD, error.to_string())),
    }
}

fn derived(name: &str) -> String {
    let mut id = DERIVED.to_owned();
    for byte in Sha256::digest(name) {
        // Writing to a string cannot fail.
        write!(id, "{byte:02x}").ok();
    }
    id
}

fn is_derived(name: &str) -> bool {
    let digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    name.strip_prefix(DERIVED).is_some_and(|rest| rest.len() == 64 && rest.bytes().all(digit))
}

/// Returns `true` for control characters other than the common white space.
fn is_forbidden(character: char) -> bool {
    character.is_control() && !matches!(character, '\t' | '\n' | '\r')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("pvc-6f1b0c3e-0000-4000-8000-000000000000")]
    #[case("A.b_c-9")]
    #[case("name-1")]
    fn a_valid_id_is_the_id_of_its_name(#[case] name: &str) {
        assert_eq!(volume_id(name).unwrap().as_str(), name);
        assert_eq!(snapshot_id(name).unwrap().as_str(), name);
    }

    #[rstest]
    #[case::path("../../etc/passwd")]
    #[case::parent("..")]
    #[case::hidden(".hidden")]
    #[case::space("my volume")]
    #[case::lines("a\nb\tc\r")]
    #[case::other_script("Bücher")]
    #[case::longest(&"/".repeat(128))]
    #[case::looks_derived("name-0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef")]
    fn any_other_name_has_a_derived_id(#[case] name: &str) {
        let id = volume_id(name).unwrap();
        assert!(is_derived(id.as_str()) && id.as_str() != name, "{id}");
        assert_eq!(volume_id(name).unwrap(), id);
        assert_eq!(snapshot_id(name).unwrap().as_str(), id.as_str());
        // The id, used as a name, identifies another volume.
        assert_ne!(volume_id(id.as_str()).unwrap(), id);
    }

    #[test]
    fn derived_ids_do_not_change_between_versions() {
        assert_eq!(
            volume_id("a b").unwrap().as_str(),
            "name-c8687a08aa5d6ed2044328fa6a697ab8e96dc34291e8c2034ae8c38e6fcc6d65"
        );
    }

    #[rstest]
    #[case::empty("")]
    #[case::long(&"n".repeat(129))]
    #[case::very_long(&"n".repeat(4096))]
    #[case::nul("a\0b")]
    #[case::escape("a\x1bb")]
    #[case::delete("a\x7fb")]
    #[case::c1("a\u{85}b")]
    fn names_that_the_specification_forbids_are_refused(#[case] name: &str) {
        assert!(volume_id(name).is_err());
        assert!(snapshot_id(name).is_err());
    }

    proptest! {
        #[test]
        fn two_names_have_two_ids(first in "(name-[0-9a-f]{64}|[a/ ]{1,6}|\\PC{1,30})", second in "([a/ ]{1,6}|\\PC{1,30})") {
            if let (Ok(first_id), Ok(second_id)) = (volume_id(&first), volume_id(&second)) {
                prop_assert_eq!(first_id == second_id, first == second);
            }
        }
    }
}
