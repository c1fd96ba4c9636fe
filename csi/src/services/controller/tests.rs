use std::thread;
use std::time::Duration;

use csi_wire::csi::volume_capability::access_mode::Mode;
use loopfs::publish::PublishRoot;
use rstest::rstest;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tonic::Code;

use super::*;
use crate::Parts;
use crate::request::tests::{block, mount, reader};
use crate::tests::args;

const NODE_KEY: &str = "topology.csi.loopfs.dev/node";

fn create(capabilities: Vec<wire::VolumeCapability>) -> wire::CreateVolumeRequest {
    wire::CreateVolumeRequest {
        name: "pvc-1".to_owned(),
        volume_capabilities: capabilities,
        ..wire::CreateVolumeRequest::default()
    }
}

fn range(required_bytes: i64, limit_bytes: i64) -> Option<wire::CapacityRange> {
    Some(wire::CapacityRange { required_bytes, limit_bytes })
}

fn pairs(pairs: &[(&str, &str)]) -> HashMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

fn nodes(names: &[&str]) -> Option<wire::TopologyRequirement> {
    let requisite =
        names.iter().map(|name| wire::Topology { segments: pairs(&[(NODE_KEY, name)]) }).collect();
    Some(wire::TopologyRequirement { requisite, preferred: Vec::new() })
}

/// Copies would otherwise take all threads of a socket, also those whose clients have given up.
#[tokio::test]
async fn copies_leave_threads_to_other_calls() {
    const DEADLINE: Duration = Duration::from_secs(60);
    let (scratch, stop) = (tempfile::tempdir().unwrap(), CancellationToken::new());
    let root = PublishRoot::open(scratch.path()).unwrap();
    let parts = Parts::new(&args(scratch.path()), root, stop.clone());
    let operations = parts.operations.limited(MAX_COPIES + 1);
    let service = Arc::new(ControllerService::new(reader(), operations.clone()));
    let (begun, mut copies_begun) = mpsc::unbounded_channel();
    let mut calls = JoinSet::new();
    let copies = [(); 3 * MAX_COPIES].map(|()| {
        let (service, begun) = (Arc::clone(&service), begun.clone());
        let copy = move |_volumes: &Volumes, is_wanted: &dyn Fn() -> bool| {
            begun.send(()).unwrap();
            while is_wanted() {
                thread::sleep(Duration::from_millis(1));
            }
            Err::<(), _>(Error::Defect("the copy was ended".to_owned()))
        };
        calls.spawn(async move { service.copying([], copy).await })
    });
    let test = async {
        for _ in 0..MAX_COPIES {
            copies_begun.recv().await.unwrap();
        }
        operations.locked([], |_volumes| Ok(())).await.unwrap();
        assert!(copies_begun.is_empty());

        // The copy ends with its call, and the next one begins.
        copies[0].abort();
        copies_begun.recv().await.unwrap();
        assert!(calls.join_next().await.unwrap().unwrap_err().is_cancelled());
        operations.locked([], |_volumes| Ok(())).await.unwrap();

        stop.cancel();
        for ended in calls.join_all().await {
            assert_eq!(ended.unwrap_err().code(), Code::Aborted);
        }
        assert!(copies_begun.is_empty());
    };
    timeout(DEADLINE, test).await.expect("a thread is free");
}

#[test]
fn a_create_request_is_converted() {
    let request = wire::CreateVolumeRequest {
        capacity_range: range(5, 10),
        parameters: pairs(&[("bytesPerInode", "4096")]),
        accessibility_requirements: nodes(&["node-2", "node-1"]),
        ..create(vec![mount(Mode::SingleNodeWriter), mount(Mode::SingleNodeReaderOnly)])
    };
    let create = reader().create(request).unwrap();
    assert_eq!((create.volume.as_str(), create.kind), ("pvc-1", VolumeKind::Filesystem));
    assert_eq!(create.capacity, CapacityRange { required: Some(Bytes(5)), limit: Some(Bytes(10)) });
    assert_eq!(create.parameters.spec(create.kind, Bytes(0)).directory.bytes_per_inode.get(), 4096);
    assert_eq!((create.source, create.accessible_here), (None, true));
}

#[rstest]
#[case::no_name(|request: &mut wire::CreateVolumeRequest| request.name.clear(), "name: ")]
#[case::long_name(|request: &mut wire::CreateVolumeRequest| request.name = "v".repeat(4096), "name: ")]
#[case::nul(|request: &mut wire::CreateVolumeRequest| request.name.push('\0'), "name: ")]
#[case::no_capability(|request: &mut wire::CreateVolumeRequest| request.volume_capabilities.clear(), "volume_capabilities: ")]
#[case::both_kinds(|request: &mut wire::CreateVolumeRequest| {
    request.volume_capabilities.push(mount(Mode::SingleNodeWriter));
}, "volume_capabilities: ")]
#[case::one_bad_capability(|request: &mut wire::CreateVolumeRequest| {
    request.volume_capabilities.push(block(Mode::MultiNodeMultiWriter));
}, "volume_capability: ")]
#[case::negative(|request: &mut wire::CreateVolumeRequest| request.capacity_range = range(-1, 0), "capacity_range: ")]
#[case::least(|request: &mut wire::CreateVolumeRequest| request.capacity_range = range(i64::MIN, i64::MIN), "capacity_range: ")]
#[case::crossed(|request: &mut wire::CreateVolumeRequest| request.capacity_range = range(i64::MAX, 1), "capacity_range: ")]
#[case::parameter(|request: &mut wire::CreateVolumeRequest| request.parameters = pairs(&[("fsType", "xfs")]), "parameters: ")]
#[case::claim(|request: &mut wire::CreateVolumeRequest| {
    let claim = [("csi.storage.k8s.io/pvc/namespace", "shop"), ("csi.storage.k8s.io/pvc/name", "a b")];
    request.parameters = pairs(&claim);
}, "parameters: ")]
#[case::mutable(|request: &mut wire::CreateVolumeRequest| request.mutable_parameters = pairs(&[("a", "b")]), "mutable_parameters: ")]
#[case::source(|request: &mut wire::CreateVolumeRequest| {
    request.volume_content_source = Some(wire::VolumeContentSource { r#type: None });
}, "volume_content_source: ")]
#[case::source_without_a_name(|request: &mut wire::CreateVolumeRequest| {
    let snapshot = SnapshotSource { snapshot_id: String::new() };
    request.volume_content_source = Some(wire::VolumeContentSource { r#type: Some(Type::Snapshot(snapshot)) });
}, "volume_content_source: ")]
fn a_create_request_with_an_invalid_field_is_refused(
    #[case] spoil: impl FnOnce(&mut wire::CreateVolumeRequest),
    #[case] field: &str,
) {
    let mut request = create(vec![block(Mode::SingleNodeWriter)]);
    spoil(&mut request);
    let error = reader().create(request).unwrap_err().to_string();
    assert!(error.starts_with(field), "{error}");
}

#[rstest]
#[case::the_claim(&[("pvc/namespace", "shop"), ("pvc/name", "data"), ("pv/name", "pvc-1")], Some("shop/data"))]
#[case::a_name_without_its_namespace(&[("pvc/name", "data")], None)]
fn a_volume_is_annotated_with(#[case] added: &[(&str, &str)], #[case] claim: Option<&str>) {
    let added = added.iter().map(|(name, value)| (format!("csi.storage.k8s.io/{name}"), (*value).to_owned()));
    let request = wire::CreateVolumeRequest {
        parameters: added.collect(),
        ..create(vec![block(Mode::SingleNodeWriter)])
    };
    assert_eq!(reader().create(request).unwrap().annotations.get("claim"), claim);
}

#[rstest]
#[case::parameter(wire::GetCapacityRequest { parameters: pairs(&[("typo", "")]), ..Default::default() })]
#[case::mode(wire::GetCapacityRequest {
    volume_capabilities: vec![mount(Mode::MultiNodeReaderOnly)], ..Default::default()
})]
fn a_capacity_query_with_invalid_parameters_is_refused(#[case] request: wire::GetCapacityRequest) {
    assert!(reader().capacity(request).is_err());
}

#[rstest]
#[case::nothing_said(0, 0, Ok(1 << 30))]
#[case::less_is_allowed(0, 8192, Ok(8192))]
#[case::an_odd_limit(0, 8191, Ok(4096))]
#[case::more_is_allowed(0, u64::MAX, Ok(1 << 30))]
#[case::too_little_is_allowed(0, 4095, Err(Code::OutOfRange))]
#[case::the_least(1, 0, Ok(4096))]
#[case::rounded_up(4097, 0, Ok(8192))]
#[case::exact(8192, 8192, Ok(8192))]
#[case::rounded_up_within_the_limit(8000, 8192, Ok(8192))]
#[case::rounded_up_above_the_limit(8000, 8191, Err(Code::OutOfRange))]
#[case::larger_than_any_file(i64::MAX as u64, 0, Err(Code::OutOfRange))]
fn new_size_is_least_allowed_multiple(
    #[case] required: u64,
    #[case] limit: u64,
    #[case] expected: Result<u64, Code>,
) {
    let some = |bytes: u64| (bytes > 0).then_some(Bytes(bytes));
    let capacity = CapacityRange { required: some(required), limit: some(limit) };
    let size = new_size(capacity).map(|size| size.0).map_err(|error| error.code());
    assert_eq!(size, expected);
}

#[rstest]
#[case::nothing_said(0, 0, Ok(8192))]
#[case::less_would_do(1, 0, Ok(8192))]
#[case::the_same(8192, 8192, Ok(8192))]
#[case::more(8193, 0, Ok(12288))]
#[case::less_is_not_to_be_had(0, 8191, Err(Code::OutOfRange))]
#[case::nor_asked(4096, 4096, Err(Code::OutOfRange))]
#[case::room_above(0, 1 << 40, Ok(8192))]
fn copied_size_is_not_below_source(
    #[case] required: u64,
    #[case] limit: u64,
    #[case] expected: Result<u64, Code>,
) {
    let some = |bytes: u64| (bytes > 0).then_some(Bytes(bytes));
    let capacity = CapacityRange { required: some(required), limit: some(limit) };
    let size = copied_size(capacity, Bytes(8192)).map(|size| size.0).map_err(|error| error.code());
    assert_eq!(size, expected);
}

#[test]
fn a_limit_below_the_source_names_the_source() {
    let capacity = CapacityRange { required: None, limit: Some(Bytes(4096)) };
    assert!(copied_size(capacity, Bytes(8192)).unwrap_err().to_string().contains("the source has"));
}

#[test]
fn sizes_use_unit_of_the_store() {
    assert_eq!(Bytes(1).round_up(), Some(UNIT));
    assert_eq!((whole_units(Bytes(4095)), whole_units(Bytes(4097))), (Bytes(0), UNIT));
}
