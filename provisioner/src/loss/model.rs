//! A model of the loss of nodes and disks: random steps of machines, the administrator, users, two controllers, the provisioners and
//! Kubernetes. All decisions are those of the program.
//!
//! Node objects vanish while their machines run, and disks move between machines and back. Writes arrive late, also those of processes
//! that were killed. The provisioners delete released volumes, those of interrupted provisioning, and orphaned ones (`--collect`), all
//! without any grace time, and reconcile the volumes of lost disks.
//!
//! It checks that data is deleted only if a user deleted its claim.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use loopfs::volume_store::VolumeId;
use rstest::rstest;
use serde_json::json;

use super::decision::{Decision, NodeLossState, decide};
use crate::node::delete;
use crate::objects::identity::Identity;
use crate::objects::loss_policy::OnNodeLoss;
use crate::objects::{ownership, pv};
use crate::store::driver::Custody;
use crate::testing::fake_store::CustodyRecord;
use crate::testing::fixtures;

const NODES: [&str; 2] = ["node-a", "node-b"];
const GRACE: u64 = 10;
const STEPS: usize = 10_000;

/// A deterministic source of choices (xorshift).
struct RandomChoices(u64);

impl RandomChoices {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % bound as u64).unwrap()
    }
}

/// A machine with a disk for volumes. The disks are swapped between the machines.
#[derive(Default)]
struct Machine {
    /// The UID of its Node object, while that exists.
    node: Option<u64>,
    runs: bool,
    disk: usize,
    /// What it has recorded about its disk.
    custody: Option<CustodyRecord>,
    /// The records of interrupted provisioning.
    records: BTreeSet<String>,
    /// The PersistentVolumes as its provisioner has them in its cache.
    cache: BTreeMap<String, PersistentVolume>,
    /// The volume that its provisioner has marked and is about to delete.
    marked: Option<(String, VolumeId)>,
}

/// A request that has left its sender.
enum InFlightWrite {
    DeleteVolume { name: String, version: Option<String> },
    RemoveFinalizer { name: String },
    DeleteClaim { name: String, version: Option<String> },
}

/// Storage that is lost.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum StorageLoss {
    Node(usize),
    /// The disk with this number is not in this machine any more.
    Disk(usize, usize),
}

/// A process that reconciles lost storage: with the role `controller`, which believes that it leads, or of a node.
#[derive(Default)]
struct ModelReconciler {
    /// The machine of a provisioner.
    machine: Option<usize>,
    lost_since: BTreeMap<(StorageLoss, String), u64>,
    /// The volumes to work on, as the pass has listed them.
    listed: Vec<(StorageLoss, PersistentVolume)>,
    in_flight: Option<InFlightWrite>,
}

/// What the model takes from the program.
#[derive(Clone, Copy)]
struct Rules {
    decide: fn(NodeLossState<'_>, &Identity) -> Decision,
    keeps: fn(&Custody, &VolumeId) -> bool,
}

const RULES: Rules = Rules { decide, keeps: Custody::keeps };

struct LossModel {
    choices: RandomChoices,
    rules: Rules,
    now: u64,
    version: u64,
    volumes: BTreeMap<String, PersistentVolume>,
    claims: BTreeMap<String, PersistentVolumeClaim>,
    /// The claims that a user deleted, by the name of their volume.
    given_up: BTreeSet<String>,
    machines: [Machine; 2],
    /// The data on each disk.
    disks: [BTreeSet<VolumeId>; 2],
    /// Two controllers, and the provisioner of each machine.
    reconcilers: [ModelReconciler; 4],
    /// The requests of processes that were killed.
    late: Vec<InFlightWrite>,
    created: usize,
    deleted: usize,
    settled: usize,
}

impl LossModel {
    fn new(seed: u64, rules: Rules) -> Self {
        let machine = |disk| Machine { node: Some(1), runs: true, disk, ..Machine::default() };
        LossModel {
            choices: RandomChoices(seed),
            rules,
            now: 0,
            version: 1,
            volumes: BTreeMap::new(),
            claims: BTreeMap::new(),
            given_up: BTreeSet::new(),
            machines: [machine(0), machine(1)],
            disks: Default::default(),
            reconcilers: [None, None, Some(0), Some(1)]
                .map(|machine| ModelReconciler { machine, ..ModelReconciler::default() }),
            late: Vec::new(),
            created: 0,
            deleted: 0,
            settled: 0,
        }
    }

    fn next_version(&mut self) -> Option<String> {
        self.version += 1;
        Some(self.version.to_string())
    }

    /// Returns one of the names, if there are any.
    fn one_of<T>(choices: &mut RandomChoices, all: &BTreeMap<String, T>) -> Option<String> {
        (!all.is_empty()).then(|| all.keys().nth(choices.below(all.len())).unwrap().clone())
    }

    /// Performs a random step. Returns the violation, if it is one.
    fn step(&mut self) -> Result<(), String> {
        self.now += 1;
        let machine = self.choices.below(2);
        match self.choices.below(20) {
            0 => self.provision(machine),
            1 => self.change_machine(machine),
            2 => self.user_deletes_claim(),
            3 => self.administrator_retains(),
            4 | 5 => self.kubernetes(),
            6 | 7 => return self.provisioner(machine),
            8 => self.watch_event(machine),
            9 => return self.audit(machine),
            10 => return self.clean_up(machine),
            11 => {
                if self.choices.below(10) == 0 {
                    let which = self.choices.below(4);
                    self.kill(which);
                }
            }
            12 => {
                if !self.late.is_empty() {
                    let which = self.choices.below(self.late.len());
                    let write = self.late.swap_remove(which);
                    self.arrive(write);
                }
            }
            _ => {
                let which = self.choices.below(4);
                self.reconcile(which);
            }
        }
        Ok(())
    }

    /// A process ends. Its request may arrive later.
    fn kill(&mut self, which: usize) {
        let machine = self.reconcilers[which].machine;
        let killed = std::mem::replace(
            &mut self.reconcilers[which],
            ModelReconciler { machine, ..ModelReconciler::default() },
        );
        self.late.extend(killed.in_flight);
    }

    fn provision(&mut self, machine: usize) {
        if !self.machines[machine].runs || self.machines[machine].node.is_none() || self.volumes.len() > 6 {
            return;
        }
        self.created += 1;
        let name = format!("pvc-{}", self.created);
        let uid = self.created.to_string();
        let policy = [OnNodeLoss::DeleteClaim, OnNodeLoss::DeleteVolume][self.choices.below(4) / 3];
        let version = self.next_version();
        let disk = self.machines[machine].disk;
        if self.choices.below(4) == 0 {
            // A power cut brought the record back that provisioning has removed.
            self.machines[machine].records.insert(name.clone());
        }
        let change = json!({
            "metadata": {
                "name": name, "uid": format!("{name}-object"), "resourceVersion": version,
                "annotations": {
                    "csi.loopfs.dev/on-node-loss": policy.as_str(),
                    "csi.loopfs.dev/node-loss-grace-seconds": GRACE.to_string(),
                },
            },
            "spec": {
                "claimRef": {"name": name, "uid": uid},
                "csi": {"volumeHandle": name, "volumeAttributes": {"csi.loopfs.dev/filesystem-uuid": disk.to_string()}},
            },
        });
        let claim = json!({
            "metadata": {"name": name, "uid": uid, "resourceVersion": version}, "spec": {"volumeName": name},
        });
        self.volumes.insert(name.clone(), fixtures::volume_on(NODES[machine], change));
        self.claims.insert(name.clone(), fixtures::bound_claim(claim));
        self.disks[disk].insert(VolumeId::parse(&name).unwrap());
    }

    fn change_machine(&mut self, which: usize) {
        if self.choices.below(3) > 0 {
            return;
        }
        let registered = self.now;
        let machine = &mut self.machines[which];
        match (machine.node, machine.runs) {
            (Some(_), true) if self.choices.below(3) == 0 => machine.runs = false,
            // By mistake, or because the machine is replaced.
            (Some(_), _) => machine.node = None,
            (None, _) => (machine.node, machine.runs) = (Some(registered), true),
        }
        if !self.machines[which].runs {
            self.machines[which].marked = None;
            self.kill(2 + which);
            let apart = self.machines.iter().all(|machine| !machine.runs);
            if apart {
                let [first, second] = &mut self.machines;
                std::mem::swap(&mut first.disk, &mut second.disk);
            }
        }
    }

    fn user_deletes_claim(&mut self) {
        if self.choices.below(6) > 0 {
            return;
        }
        let Some(name) = Self::one_of(&mut self.choices, &self.claims) else { return };
        let version = self.next_version();
        let claim = self.claims.get_mut(&name).unwrap();
        claim.metadata.deletion_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
        claim.metadata.resource_version = version;
        self.given_up.insert(name);
    }

    fn administrator_retains(&mut self) {
        if self.choices.below(8) > 0 {
            return;
        }
        let Some(name) = Self::one_of(&mut self.choices, &self.volumes) else { return };
        let version = self.next_version();
        let volume = self.volumes.get_mut(&name).unwrap();
        volume.annotations_mut().insert("csi.loopfs.dev/on-node-loss".to_owned(), "retain".to_owned());
        volume.metadata.resource_version = version;
    }

    /// A controller of Kubernetes acts on one volume and its claim.
    fn kubernetes(&mut self) {
        let Some(name) = Self::one_of(&mut self.choices, &self.volumes) else { return };
        self.claims.retain(|of, claim| *of != name || claim.metadata.deletion_timestamp.is_none());
        let has_claim = self.claims.contains_key(&name);
        let version = self.next_version();
        let volume = self.volumes.get_mut(&name).unwrap();
        if !has_claim && pv::phase(volume) == Some("Bound") {
            volume.status.as_mut().unwrap().phase = Some("Released".to_owned());
            volume.metadata.resource_version = version;
        } else if volume.metadata.deletion_timestamp.is_some() && pv::phase(volume) != Some("Bound") {
            volume.finalizers_mut().retain(|finalizer| finalizer != "kubernetes.io/pv-protection");
            volume.metadata.resource_version = version;
        }
        self.remove_without_finalizers(&name);
    }

    fn remove_without_finalizers(&mut self, name: &str) {
        self.volumes.retain(|of, volume| {
            of != name || volume.metadata.deletion_timestamp.is_none() || !volume.finalizers().is_empty()
        });
    }

    /// The API server performs a request.
    fn arrive(&mut self, write: InFlightWrite) {
        let version = self.next_version();
        match write {
            InFlightWrite::DeleteVolume { name, version: expected } => {
                if let Some(volume) = self.volumes.get_mut(&name)
                    && volume.metadata.resource_version == expected
                {
                    volume.metadata.deletion_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
                    volume.metadata.resource_version = version;
                    self.remove_without_finalizers(&name);
                }
            }
            InFlightWrite::RemoveFinalizer { name } => {
                if let Some(volume) = self.volumes.get_mut(&name) {
                    volume.finalizers_mut().retain(|finalizer| finalizer != pv::FINALIZER);
                    volume.metadata.resource_version = version;
                    self.remove_without_finalizers(&name);
                }
            }
            InFlightWrite::DeleteClaim { name, version: expected } => {
                if let Some(claim) = self.claims.get_mut(&name)
                    && claim.metadata.resource_version == expected
                {
                    claim.metadata.deletion_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
                    claim.metadata.resource_version = version;
                    self.settled += 1;
                }
            }
        }
    }

    /// A process that reconciles lost storage makes a step: a request arrives, it decides about a volume, or it begins a pass.
    fn reconcile(&mut self, which: usize) {
        if let Some(write) = self.reconcilers[which].in_flight.take() {
            return self.arrive(write);
        }
        if let Some(machine) = self.reconcilers[which].machine
            && !self.machines[machine].runs
        {
            return;
        }
        let Some((place, listed)) = self.reconcilers[which].listed.pop() else {
            return self.list(which);
        };
        let name = listed.name_any();
        let since = self.reconcilers[which].lost_since.get(&(place.clone(), name.clone())).copied();
        let lost_for = Duration::from_secs(since.map_or(0, |since| self.now - since));
        let Some(volume) = self.volumes.get(&name) else { return };
        let (StorageLoss::Node(machine) | StorageLoss::Disk(machine, _)) = place;
        let state = NodeLossState { volume, node: NODES[machine], claim: self.claims.get(&name), lost_for };
        let decision = (self.rules.decide)(state, &fixtures::identity());
        let version = volume.resource_version();
        let claim = self.claims.get(&name).and_then(ResourceExt::resource_version);
        let write = match decision {
            Decision::DeletePv => InFlightWrite::DeleteVolume { name, version },
            Decision::RemoveFinalizer => InFlightWrite::RemoveFinalizer { name },
            Decision::DeleteClaim => InFlightWrite::DeleteClaim { name, version: claim },
            _ => return,
        };
        if self.is_lost(&place) {
            // The next step of this process is the arrival, and after it the same volume again.
            self.reconcilers[which].listed.push((place, listed));
            self.reconcilers[which].in_flight = Some(write);
        }
    }

    fn is_lost(&self, place: &StorageLoss) -> bool {
        match *place {
            StorageLoss::Node(machine) => self.machines[machine].node.is_none(),
            StorageLoss::Disk(machine, disk) => self.machines[machine].disk != disk,
        }
    }

    fn list(&mut self, which: usize) {
        let machine = self.reconcilers[which].machine;
        let places = match machine {
            None => vec![StorageLoss::Node(0), StorageLoss::Node(1)],
            // A provisioner does nothing about a lost disk before it has recorded the present one.
            Some(machine) if self.take_custody(machine).is_some() => {
                vec![StorageLoss::Disk(machine, 1 - self.machines[machine].disk)]
            }
            Some(_) => vec![],
        };
        let mut lost_since = BTreeMap::new();
        let mut listed = Vec::new();
        for place in places.into_iter().filter(|place| self.is_lost(place)) {
            let (StorageLoss::Node(machine) | StorageLoss::Disk(machine, _)) = place;
            for (name, volume) in &self.volumes {
                let identity = fixtures::identity();
                let filesystem = ownership::filesystem_uuid(volume, &identity);
                let is_there = match place {
                    StorageLoss::Node(_) => true,
                    StorageLoss::Disk(_, disk) => filesystem == Some(disk.to_string().as_str()),
                };
                if is_there && ownership::is_only_on(volume, NODES[machine], &identity) {
                    let key = (place.clone(), name.clone());
                    let since = self.reconcilers[which].lost_since.get(&key).copied();
                    lost_since.insert(key, since.unwrap_or(self.now));
                    listed.push((place.clone(), volume.clone()));
                }
            }
        }
        let process = &mut self.reconcilers[which];
        (process.lost_since, process.listed) = (lost_since, listed);
    }

    /// Returns the record of a machine that runs and whose Node object exists.
    fn take_custody(&mut self, which: usize) -> Option<Custody> {
        let machine = &mut self.machines[which];
        let node = machine.node.filter(|_| machine.runs)?.to_string();
        let present = &self.disks[machine.disk];
        let record = CustodyRecord::next(machine.custody.take(), &node, &machine.disk.to_string(), present);
        machine.custody = Some(record.clone());
        Some(record.custody)
    }

    /// The watch of a provisioner delivers what happened to one volume, possibly long ago.
    fn watch_event(&mut self, which: usize) {
        if self.machines[which].node.is_none() {
            return;
        }
        for name in self.machines[which].cache.keys().cloned().collect::<Vec<_>>() {
            if !self.volumes.contains_key(&name) && self.choices.below(2) == 0 {
                self.machines[which].cache.remove(&name);
            }
        }
        if let Some(name) = Self::one_of(&mut self.choices, &self.volumes) {
            let volume = self.volumes[&name].clone();
            self.machines[which].cache.insert(name, volume);
        }
    }

    /// A provisioner marks a volume, or deletes one that it has marked.
    fn provisioner(&mut self, which: usize) -> Result<(), String> {
        let machine = &mut self.machines[which];
        if !machine.runs {
            return Ok(());
        }
        let identity = Identity::new("csi.loopfs.dev", NODES[which]).unwrap();
        if let Some((name, id)) = machine.marked.take() {
            let disk = machine.disk;
            let filesystem =
                self.volumes.get(&name).and_then(|volume| ownership::filesystem_uuid(volume, &identity));
            if filesystem.is_some_and(|uuid| uuid != disk.to_string()) {
                return Ok(());
            }
            self.delete_data(disk, &id, "its provisioner")?;
            self.arrive(InFlightWrite::RemoveFinalizer { name });
            return Ok(());
        }
        let Some(name) = Self::one_of(&mut self.choices, &machine.cache) else { return Ok(()) };
        let cached = &machine.cache[&name];
        if let Ok(delete::DeletionPlan::Delete(id)) = delete::plan(cached, &identity) {
            let version = cached.resource_version();
            let is_unchanged =
                self.volumes.get(&name).is_some_and(|volume| volume.resource_version() == version);
            if is_unchanged {
                self.arrive(InFlightWrite::DeleteVolume { name: name.clone(), version });
                self.machines[which].marked = Some((name, id));
            }
        }
        Ok(())
    }

    /// A provisioner with `--collect` audits.
    fn audit(&mut self, which: usize) -> Result<(), String> {
        let disk = self.machines[which].disk;
        let orphans = self.disks[disk].iter().filter(|id| !self.volumes.contains_key(id.as_str()));
        let orphans: Vec<_> = orphans.cloned().collect();
        let Some(custody) = self.take_custody(which) else { return Ok(()) };
        let keeps = self.rules.keeps;
        let mut collected = orphans.iter().filter(|id| !keeps(&custody, id));
        collected.try_for_each(|id| self.delete_data(disk, id, "--collect"))
    }

    /// A provisioner processes a record of interrupted provisioning.
    fn clean_up(&mut self, which: usize) -> Result<(), String> {
        let disk = self.machines[which].disk;
        let Some(name) = self.machines[which].records.first().cloned() else { return Ok(()) };
        if self.claims.contains_key(&name) || self.volumes.contains_key(&name) {
            return Ok(());
        }
        let Some(custody) = self.take_custody(which) else { return Ok(()) };
        let id = VolumeId::parse(&name).unwrap();
        self.machines[which].records.remove(&name);
        if (self.rules.keeps)(&custody, &id) {
            return Ok(());
        }
        self.delete_data(disk, &id, "the cleanup")
    }

    fn delete_data(&mut self, disk: usize, id: &VolumeId, by: &str) -> Result<(), String> {
        if self.disks[disk].remove(id) {
            self.deleted += 1;
            if !self.given_up.contains(id.as_str()) {
                return Err(format!("{by} deleted volume {id}, whose claim no user deleted"));
            }
        }
        Ok(())
    }
}

/// Runs the model with some seeds. Returns the first violation.
fn violation(rules: Rules, seeds: std::ops::Range<u64>) -> Option<String> {
    let (mut deleted, mut settled) = (0, 0);
    for seed in seeds {
        let mut model = LossModel::new(seed * 2_654_435_761 + 1, rules);
        for step in 0..STEPS {
            if let Err(violation) = model.step() {
                return Some(format!("seed {seed}, step {step}: {violation}"));
            }
        }
        deleted += model.deleted;
        settled += model.settled;
    }
    // Otherwise the model would prove nothing.
    assert!(deleted > 100 && settled > 100, "{deleted} volumes deleted, {settled} claims of lost nodes");
    None
}

#[test]
fn lost_node_deletes_no_data() {
    assert_eq!(violation(RULES, 0..20), None);
}

/// Each of these rules is wrong, and the model finds it.
#[rstest]
#[case::the_claim_first(Rules { decide: |state, identity| match decide(state, identity) {
    Decision::DeletePv | Decision::RemoveFinalizer if state.claim.is_some() => Decision::DeleteClaim,
    other => other,
}, ..RULES })]
#[case::the_finalizer_last(Rules { decide: |state, identity| match decide(state, identity) {
    Decision::RemoveFinalizer if state.claim.is_some() => Decision::DeleteClaim,
    other => other,
}, ..RULES })]
#[case::orphans_of_a_returned_node(Rules { keeps: |_, _| false, ..RULES })]
fn the_model_finds_a_wrong_rule(#[case] wrong: Rules) {
    let found = violation(wrong, 0..20).expect("a violation");
    assert!(found.contains("whose claim no user deleted"), "{found}");
}
