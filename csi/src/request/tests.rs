use csi_wire::csi::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use loopfs::volume_store::SnapshotId;
use proptest::prelude::*;
use rstest::rstest;
use tonic::Code;

use super::*;

const KUBELET: &str = "/var/lib/kubelet";

pub(crate) fn reader() -> RequestReader {
    let driver_name = "csi.loopfs.dev".parse().unwrap();
    let node = ThisNode::new(&driver_name, "node-1".to_owned());
    RequestReader::new(&driver_name, node, Path::new(KUBELET))
}

pub(crate) fn capability_of(access_type: AccessType, mode: Mode) -> wire::VolumeCapability {
    wire::VolumeCapability {
        access_type: Some(access_type),
        access_mode: Some(AccessMode { mode: mode as i32 }),
    }
}

pub(crate) fn mount(mode: Mode) -> wire::VolumeCapability {
    capability_of(AccessType::Mount(MountVolume::default()), mode)
}

pub(crate) fn block(mode: Mode) -> wire::VolumeCapability {
    capability_of(AccessType::Block(BlockVolume {}), mode)
}

fn parse_path(text: &str) -> Result<TargetPath> {
    reader().path("target_path", text)
}

fn volume_named(name: &str) -> Result<VolumeId> {
    id_of_name(name)
}

fn snapshot_named(name: &str) -> Result<SnapshotId> {
    id_of_name(name)
}

#[rstest]
#[case("/var/lib/kubelet/pods/1/mount", "pods/1/mount")]
#[case("/var/lib/kubelet/target", "target")]
#[case("/var//lib/kubelet/./pods//1/", "pods/1")]
#[case("/var/lib/kubelet/a b/ü", "a b/ü")]
fn paths_in_kubelet_directory_are_accepted(#[case] text: &str, #[case] relative: &str) {
    assert_eq!(parse_path(text).unwrap().relative(), Path::new(relative));
}

#[rstest]
#[case::empty("")]
#[case::relative("pods/1")]
#[case::the_directory_itself("/var/lib/kubelet")]
#[case::the_directory_with_a_slash("/var/lib/kubelet/")]
#[case::outside("/etc/passwd")]
#[case::neighbour("/var/lib/kubelet-other/x")]
#[case::leads_out("/var/lib/kubelet/../x")]
#[case::leads_out_and_back("/var/lib/kubelet/pods/../pods/x")]
#[case::nul("/var/lib/kubelet/a\0b")]
#[case::newline("/var/lib/kubelet/a\nb")]
#[case::long_name(&format!("{KUBELET}/{}", "n".repeat(256)))]
#[case::long_path(&format!("{KUBELET}/{}", "n/".repeat(2048)))]
fn other_paths_are_refused(#[case] text: &str) {
    assert!(parse_path(text).is_err());
}

proptest! {
    #[test]
    fn accepted_path_stays_in_kubelet_directory(text in "(/var/lib/kubelet)?[a./ \\-\\x00-\\x1f]{0,60}") {
        if let Ok(path) = parse_path(&text) {
            prop_assert!(path.relative().components().all(|part| matches!(part, Component::Normal(_))));
            prop_assert!(path.relative().file_name().is_some());
        }
    }
}

#[rstest]
#[case("pvc-1", Some("pvc-1"))]
#[case("../../etc", None)]
#[case(&"v".repeat(4096), None)]
fn an_impossible_id_counts_as_deleted(#[case] text: &str, #[case] id: Option<&str>) {
    assert_eq!(deleted_id("snapshot_id", text).unwrap().as_ref().map(SnapshotId::as_str), id);
    assert_eq!(deleted_id("volume_id", text).unwrap().as_ref().map(VolumeId::as_str), id);
    let found = existing_id::<SnapshotId>("snapshot_id", "snapshot", text);
    let found = found.map(|id| id.to_string()).map_err(|error| error.code());
    assert_eq!(found, id.map(str::to_owned).ok_or(Code::NotFound));
}

#[test]
fn an_empty_id_is_refused() {
    assert!(deleted_id::<VolumeId>("volume_id", "").is_err());
    let error = existing_id::<SnapshotId>("snapshot_id", "snapshot", "").unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
}

#[rstest]
#[case("pvc-6f1b0c3e-0000-4000-8000-000000000000")]
#[case("A.b_c-9")]
#[case("name-1")]
fn valid_name_is_its_own_id(#[case] name: &str) {
    assert_eq!(volume_named(name).unwrap().as_str(), name);
    assert_eq!(snapshot_named(name).unwrap().as_str(), name);
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
fn other_names_have_derived_ids(#[case] name: &str) {
    let id = volume_named(name).unwrap();
    assert!(is_derived(id.as_str()) && id.as_str() != name, "{id}");
    assert_eq!(volume_named(name).unwrap(), id);
    assert_eq!(snapshot_named(name).unwrap().as_str(), id.as_str());
    // The id, used as a name, identifies another volume.
    assert_ne!(volume_named(id.as_str()).unwrap(), id);
}

#[test]
fn derived_ids_are_stable_across_versions() {
    assert_eq!(
        volume_named("a b").unwrap().as_str(),
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
fn forbidden_names_are_refused(#[case] name: &str) {
    assert!(volume_named(name).is_err());
    assert!(snapshot_named(name).is_err());
}

proptest! {
    #[test]
    fn two_names_have_two_ids(first in "(name-[0-9a-f]{64}|[a/ ]{1,6}|\\PC{1,30})", second in "([a/ ]{1,6}|\\PC{1,30})") {
        if let (Ok(first_id), Ok(second_id)) = (volume_named(&first), volume_named(&second)) {
            prop_assert_eq!(first_id == second_id, first == second);
        }
    }
}

#[rstest]
#[case::absent(None, Ok(CapacityRange::default()))]
#[case::unspecified(Some((0, 0)), Ok(CapacityRange::default()))]
#[case::require_non_empty(Some((1, 0)), Ok(CapacityRange { required: Some(Bytes(1)), limit: None }))]
#[case::limit(Some((0, i64::MAX)), Ok(CapacityRange { required: None, limit: Some(Bytes(i64::MAX as u64)) }))]
#[case::both(Some((5, 5)), Ok(CapacityRange { required: Some(Bytes(5)), limit: Some(Bytes(5)) }))]
#[case::crossed(Some((6, 5)), Err(()))]
#[case::negative(Some((-1, 0)), Err(()))]
#[case::negative_limit(Some((0, i64::MIN)), Err(()))]
fn a_capacity_range_must_be_consistent(
    #[case] range: Option<(i64, i64)>,
    #[case] expected: Result<CapacityRange, ()>,
) {
    let range =
        range.map(|(required_bytes, limit_bytes)| wire::CapacityRange { required_bytes, limit_bytes });
    assert_eq!(CapacityRange::parse(range).map_err(drop), expected);
}

#[rstest]
#[case::first_page(0, "", Ok((None, None)))]
#[case::some(2, "", Ok((None, Some(2))))]
#[case::rest(0, "after:v-2", Ok((Some("v-2"), None)))]
#[case::more(1, "after:v-2", Ok((Some("v-2"), Some(1))))]
#[case::negative(-1, "", Err(Code::InvalidArgument))]
#[case::others_token(0, "invalid-token", Err(Code::Aborted))]
#[case::path(0, "after:../v", Err(Code::Aborted))]
fn list_request_is_parsed(
    #[case] max_entries: i32,
    #[case] starting_token: &str,
    #[case] expected: Result<(Option<&str>, Option<usize>), Code>,
) {
    let list = ListRequest::<VolumeId>::parse(max_entries, starting_token).map_err(|error| error.code());
    let list = list
        .map(|ListRequest { from, max_entries }| (from.map(|PageToken(last)| last.to_string()), max_entries));
    assert_eq!(list, expected.map(|(from, max_entries)| (from.map(str::to_owned), max_entries)));
}

#[test]
fn a_displayed_token_parses_to_itself() {
    let token = PageToken(VolumeId::parse("v-1").unwrap());
    assert_eq!(PageToken::parse(&token.to_string()), Some(token));
    let token = PageToken(SnapshotId::parse("s-1").unwrap());
    assert_eq!(PageToken::parse(&token.to_string()), Some(token));
}
