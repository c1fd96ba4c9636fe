//! The table of all sabotages, in the order of their stories.

use anyhow::Context;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};

use super::{data_disk, data_files, driver, leak, objects};
use crate::e2e::sabotage::Sabotage;
use crate::e2e::stories::*;

pub(in crate::e2e) static SABOTAGES: &[Sabotage] = &[
    Sabotage {
        name: "quota",
        about: "The data disk is mounted without project quotas",
        story: install::NAME,
        before: "apply the manifests",
        change: |env| Box::pin(data_disk::mount_without_quota(env)),
        repair: Some(|env| Box::pin(data_disk::mount_properly(env))),
        expected: data_disk::WITHOUT_QUOTA,
    },
    Sabotage {
        name: "no-disk",
        about: "The data disk is not mounted",
        story: install::NAME,
        before: "apply the manifests",
        change: |env| Box::pin(data_disk::unmount_disk(env)),
        repair: Some(|env| Box::pin(data_disk::mount_properly(env))),
        expected: data_disk::UNMOUNTED,
    },
    Sabotage {
        name: "wrong-disk",
        about: "Another file system is mounted in place of the one that was initialised",
        story: install::NAME,
        before: "apply the manifests",
        change: |env| Box::pin(data_disk::replace_disk(env)),
        repair: Some(|env| Box::pin(data_disk::forget_identity(env))),
        expected: data_disk::REPLACED,
    },
    Sabotage {
        name: "readonly",
        about: "The pod can write to the volume that its arguments call read-only",
        story: flow::NAME,
        before: "the claims are bound to volumes of exactly that size",
        change: |env| Box::pin(objects::mount_flow_writable(env)),
        repair: None,
        expected: &["a write was allowed on the read-only volume", "/vol/readonly"],
    },
    Sabotage {
        name: "resize",
        about: "The API server rejects the expansion of the volumes",
        story: flow::NAME,
        before: "ask for 4Mi",
        change: |env| Box::pin(driver::reject_expansion(env)),
        repair: Some(|env| Box::pin(driver::allow_writes(env))),
        expected: &["has not grown", "4Mi asked", "it has 1Mi"],
    },
    Sabotage {
        name: "writable-claim",
        about: "The pod has the claim that it requests read-only writable",
        story: read_only_claims::NAME,
        before: "the same pod cannot write to the volume",
        change: |env| Box::pin(objects::mount_claim_writable(env)),
        repair: None,
        expected: &["a write was allowed on the read-only volume"],
    },
    Sabotage {
        name: "losetup",
        about: "Another losetup than that of the run comes first on the node",
        story: node::NAME,
        before: "the node has the losetup of this run",
        change: |env| Box::pin(data_files::add_losetup(env)),
        repair: Some(|env| Box::pin(data_files::remove_losetup(env))),
        expected: &["losetup --version prints", "losetup from loopfs"],
    },
    Sabotage {
        name: "clone",
        about: "The clone does not have what was written to the original",
        story: clones::NAME,
        before: "the clone has what was written",
        change: |env| Box::pin(data_files::overwrite_files(env)),
        repair: None,
        expected: &["pod clone-filesystem reads \"of another", " instead of \"of the original\""],
    },
    Sabotage {
        name: "rejected-resize",
        about: "A volume has grown although its expansion was rejected",
        story: infeasible_resize::NAME,
        before: "the pod goes on with what it had",
        change: |env| Box::pin(data_files::raise_limits(env)),
        repair: None,
        expected: &["expected 1048576 bytes in"],
    },
    Sabotage {
        name: "retained-data",
        about: "The data of a retained volume is lost",
        story: retained_volumes::NAME,
        before: "another claim is given the volume, with its data",
        change: |env| Box::pin(data_files::overwrite_files(env)),
        repair: None,
        expected: &["the retained volume contains \"of another volume\""],
    },
    Sabotage {
        name: "data-in-use",
        about: "The data of a volume in use is lost with its claim",
        story: deletion_in_use::NAME,
        before: "the pod still has its data",
        change: |env| Box::pin(data_files::overwrite_files(env)),
        repair: None,
        expected: &["pod in-use-filesystem reads \"of another"],
    },
    Sabotage {
        name: "orphan",
        about: "A volume has no PersistentVolume before the story deletes one",
        story: orphans::NAME,
        before: "the audit finds nothing",
        change: |env| Box::pin(data_files::add_volume(env)),
        repair: Some(|env| Box::pin(data_files::remove_volume(env))),
        expected: &["the audit lists"],
    },
    Sabotage {
        name: "orphan-data",
        about: "The data of a volume is lost with its PersistentVolume",
        story: orphans::NAME,
        before: "a new object brings its data back",
        change: |env| Box::pin(data_files::overwrite_files(env)),
        repair: None,
        expected: &["the volume contains \"of another volume\""],
    },
    Sabotage {
        name: "silence",
        about: "The driver is frozen, and reports nothing of a claim",
        story: bad_claims::NAME,
        before: "an access mode of several nodes is rejected",
        change: |env| Box::pin(driver::freeze_driver(env)),
        repair: None,
        expected: &["expected an event that contains", "ReadWriteMany"],
    },
    Sabotage {
        name: "left-behind",
        about: "A rejected claim leaves a volume",
        story: bad_claims::NAME,
        before: "nothing is left on the node",
        change: |env| Box::pin(data_files::add_volume(env)),
        repair: Some(|env| Box::pin(data_files::remove_volume(env))),
        expected: &["left behind", "pvc-00000000"],
    },
    Sabotage {
        name: "restarted-driver",
        about: "The API server rejects new PersistentVolumes after the driver was replaced",
        story: driver_restart::NAME,
        before: "a new claim is provisioned and mounted",
        change: |env| Box::pin(driver::reject_creation(env)),
        repair: Some(|env| Box::pin(driver::allow_writes(env))),
        expected: &["pod after-restart does not run"],
    },
    Sabotage {
        name: "host-users",
        about: "The pod has no user namespace",
        story: user_namespaces::NAME,
        before: "the pod is root of a namespace of its own, and writes",
        change: |env| Box::pin(objects::use_host_users(env)),
        repair: None,
        expected: &["the pod's ids are mapped as"],
    },
    Sabotage {
        name: "other-tenant",
        about: "The files of the other tenant can be written by everybody",
        story: hostile_tenant::NAME,
        before: "csi puts the files back, and the provisioner reports both volumes",
        change: |env| Box::pin(data_files::open_other_volume(env)),
        repair: None,
        expected: &["the other tenant's volume was", "666"],
    },
    Sabotage {
        name: "privileges",
        about: "A program in the provisioner's container can get the user of its file",
        story: hostile_provisioner::NAME,
        before: "each attack fails in the provisioner's container",
        change: |env| Box::pin(driver::allow_privileges(env)),
        repair: None,
        expected: &["an attacker in the container provisioner can run a program as root"],
    },
    Sabotage {
        name: "host-kernel",
        about: "The pod runs on the kernel of the node",
        story: gvisor::NAME,
        before: "the kernel that the pod sees is gVisor's",
        change: |env| Box::pin(objects::use_host_kernel(env)),
        repair: None,
        expected: &["the pod runs on"],
    },
    Sabotage {
        name: "noexec",
        about: "The directory of the kubelet forbids programs",
        story: kubelet_root::NAME,
        before: "the kubelet's root is a mount of the data disk with nodev, nosuid and exec",
        change: |env| Box::pin(data_files::forbid_programs(env)),
        repair: Some(|env| Box::pin(data_files::allow_programs(env))),
        expected: &["/var/lib/kubelet", "noexec"],
    },
    Sabotage {
        name: "kubelet-limits",
        about: "The projects of the kubelet have no limits",
        story: kubelet_quotas::NAME,
        before: "the kubelet has given each emptyDir a project",
        change: |env| Box::pin(data_files::remove_kubelet_limits(env)),
        repair: None,
        expected: &["has no limit"],
    },
    Sabotage {
        name: "second-volume",
        about: "A volume is created again",
        story: half_provisioned::NAME,
        before: "the claims have the volumes that were made, and the deleted one has none",
        change: |env| Box::pin(data_files::add_volume(env)),
        repair: Some(|env| Box::pin(data_files::remove_volume(env))),
        expected: &["pvc-00000000", "and those that were made first are"],
    },
    Sabotage {
        name: "too-many-volumes",
        about: "A volume more is on the node than there are claims",
        story: outages::NAME,
        before: "each claim has one volume, and no volume is without",
        change: |env| Box::pin(data_files::add_volume(env)),
        repair: Some(|env| Box::pin(data_files::remove_volume(env))),
        expected: &["100 claims, and on the node the volumes"],
    },
    Sabotage {
        name: "capacity",
        about: "A node without storage has capacity",
        story: second_node::NAME,
        before: "the driver is not registered there and publishes no free capacity",
        change: |env| Box::pin(objects::publish_capacity(env)),
        repair: Some(|env| Box::pin(objects::remove_other_nodes(env))),
        expected: &["is published"],
    },
    Sabotage {
        name: "retained-claim",
        about: "The volume of a lost node is to be retained",
        story: node_loss::NAME,
        before: "the grace time is now a second, and the machine and its Node go",
        change: |env| Box::pin(objects::retain_on_node_loss(env)),
        repair: Some(|env| Box::pin(objects::remove_lost_volume(env))),
        expected: &["wait for the deletion of persistentvolumeclaims/on-a-lost-node", "it still exists"],
    },
    Sabotage {
        name: "unsynced",
        about: "The data written before the power cut is not synced",
        story: power_cut::NAME,
        before: "cut the power",
        change: |env| Box::pin(data_files::unsync(env)),
        repair: None,
        expected: &["is not what was written", "/vol/power-cut-"],
    },
    Sabotage {
        name: "chart",
        about: "The API server rejects the expansion of volumes after the chart was installed",
        story: helm::NAME,
        before: "the volumes are expanded in use",
        change: |env| Box::pin(driver::reject_expansion(env)),
        repair: Some(|env| Box::pin(driver::allow_writes(env))),
        expected: &["claim helm-filesystem is not given 2Mi"],
    },
    Sabotage {
        name: "labels",
        about: "The claims have no labels",
        story: claim_labels::NAME,
        before: "each bound claim has the label of its node",
        change: |env| Box::pin(objects::remove_labels(env)),
        repair: None,
        expected: &["claim labels-before-", "has the labels"],
    },
    Sabotage {
        name: "snapshot-data",
        about: "A snapshot does not have the content of its volume",
        story: snapshots::NAME,
        before: "a volume of the same size has the content of the snapshot",
        change: |env| Box::pin(data_files::overwrite_snapshots(env)),
        repair: Some(|env| Box::pin(crate::test_env::snapshots::delete_all(env))),
        expected: &["kept"],
    },
    Sabotage {
        name: "leak",
        about: "A loop device, a project id with a limit, a mount and a file are left on the node",
        story: removal::NAME,
        before: "files, project ids, loop devices and mounts are as before",
        change: |env| Box::pin(leak::leak(env)),
        repair: Some(|env| Box::pin(leak::remove_leak(env))),
        expected: leak::LEAKED,
    },
    Sabotage {
        name: "restart",
        about: "A container of the driver is killed, which the story does not declare",
        story: removal::NAME,
        before: "no volume of the driver is left",
        change: |env| Box::pin(driver::kill_undeclared(env)),
        repair: None,
        expected: &["container csi of pod", "restarted, which the test did not cause", "exit code 137"],
    },
];

/// Parses the value of `--break`.
pub(in crate::e2e) fn parser() -> impl TypedValueParser<Value = &'static Sabotage> {
    let values = SABOTAGES.iter().map(|sabotage| PossibleValue::new(sabotage.name).help(sabotage.about));
    PossibleValuesParser::new(values).try_map(|name| {
        SABOTAGES.iter().find(|sabotage| sabotage.name == name).context("there is no such sabotage")
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::e2e::catalogue;

    #[test]
    fn each_story_has_a_sabotage() {
        let sabotaged: BTreeSet<&str> = SABOTAGES.iter().map(|sabotage| sabotage.story).collect();
        assert_eq!(sabotaged, catalogue::names().collect());
    }

    #[test]
    fn names_are_unique() {
        let names: BTreeSet<&str> = SABOTAGES.iter().map(|sabotage| sabotage.name).collect();
        assert_eq!(names.len(), SABOTAGES.len());
        assert!(SABOTAGES.iter().all(|sabotage| !sabotage.expected.is_empty()));
    }

    /// Returns the sources of a story: a file or a directory, and the files of the steps that it shares.
    fn sources(story: &str) -> String {
        let stories = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/e2e/stories");
        let name = story.replace('-', "_");
        let mut paths = vec![stories.join(format!("{name}.rs"))];
        if let Ok(entries) = fs::read_dir(stories.join(&name)) {
            paths = entries.map(|entry| entry.unwrap().path()).collect();
        }
        if story == second_node::NAME {
            paths.push(stories.join("../parts/node_without_storage.rs"));
        }
        paths.iter().map(|path| fs::read_to_string(path).unwrap()).collect()
    }

    #[test]
    fn each_sabotage_names_a_step() {
        for sabotage in SABOTAGES {
            let step = format!("{}\"", sabotage.before);
            assert!(sources(sabotage.story).contains(&step), "{}: {step}", sabotage.name);
        }
    }
}
