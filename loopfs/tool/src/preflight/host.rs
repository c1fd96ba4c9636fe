//! What the node itself does with the loop devices of volumes, and how SELinux confines this process.

use std::fs;
use std::path::{Path, PathBuf};

use loopfs::loop_device::PoolOptions;

use super::check::Check;
use super::read::{loop_devices, loop_index, text};

/// The directories of udev's rules. The first that has a file of a name decides (udev(7)).
const RULES: [&str; 5] = [
    "/etc/udev/rules.d",
    "/run/udev/rules.d",
    "/usr/local/lib/udev/rules.d",
    "/usr/lib/udev/rules.d",
    "/lib/udev/rules.d",
];
/// The name of the rule, and a property that it sets.
const RULE: &str = "59-loopfs.rules";
const PROPERTY: &str = "UDEV_DISABLE_PERSISTENT_STORAGE_RULES_FLAG";

/// What the node itself does with the loop devices of volumes.
#[derive(Clone, Debug)]
pub(super) struct HostFacts {
    /// `true` if udev has the rule. `None` if no udev is visible.
    pub(super) udev_rule: Option<bool>,
    /// `true` if LVM ignores the devices. `None` if no LVM is visible.
    pub(super) lvm_filter: Option<bool>,
    /// The devices with others on top of them, such as `loop65536 (dm-0)`.
    pub(super) held: Vec<String>,
    /// The security label of this process. `None` if no security module gives it one.
    pub(super) label: Option<String>,
}

impl HostFacts {
    pub(super) fn gather() -> Self {
        let label = text("/proc/thread-self/attr/current");
        Self {
            udev_rule: Path::new("/run/udev").exists().then(|| has_rule(&RULES.map(PathBuf::from))),
            lvm_filter: ignored_by_lvm(Path::new("/etc/lvm")),
            held: held(Path::new("/sys/block")),
            label: label
                .map(|label| label.trim_end_matches('\0').to_owned())
                .filter(|label| !label.is_empty()),
        }
    }
}

/// Returns `true` if the rule is in one of the directories, and not replaced by an empty file in an earlier one.
fn has_rule(directories: &[PathBuf]) -> bool {
    let rule = directories.iter().find_map(|directory| text(directory.join(RULE)));
    rule.is_some_and(|rule| rule.contains(PROPERTY))
}

/// Returns `true` if LVM ignores loop devices: by a filter, or because it uses only the devices that a file lists (lvmdevices(8)).
fn ignored_by_lvm(directory: &Path) -> Option<bool> {
    let configuration = text(directory.join("lvm.conf"))?;
    let local = text(directory.join("lvmlocal.conf")).unwrap_or_default();
    let lists_devices = lists_devices(&configuration) && directory.join("devices/system.devices").exists();
    // The local file replaces settings of the other one.
    let filter = global_filter(&local).or_else(|| global_filter(&configuration));
    Some(lists_devices || filter.is_some_and(|filter| rejects_loop_devices(&filter)))
}

/// Returns `true` if LVM uses a devices file. If it is not set, the configuration has the default in a comment.
fn lists_devices(configuration: &str) -> bool {
    let value = |line: &str, prefix: &str| -> Option<bool> {
        let value = line.trim().strip_prefix(prefix)?.trim_start().strip_prefix("use_devicesfile")?;
        Some(value.trim_start().strip_prefix('=')?.trim() == "1")
    };
    let last = |prefix: &str| configuration.lines().filter_map(|line| value(line, prefix)).next_back();
    last("").or_else(|| last("#")).unwrap_or(false)
}

/// Returns the patterns of the last `global_filter`. Comments are left out.
fn global_filter(configuration: &str) -> Option<Vec<String>> {
    let lines = configuration.lines().filter(|line| !line.trim_start().starts_with('#'));
    let settings = lines.collect::<Vec<_>>().join("\n");
    let value = settings.rsplit_once("global_filter")?.1.trim_start().strip_prefix('=')?;
    let list = value.split(']').next()?;
    Some(list.split('"').skip(1).step_by(2).map(str::to_owned).collect())
}

/// Returns `true` if the first pattern that is about all devices or about loop devices rejects them. A pattern is `a` or `r`, and a
/// regular expression between two delimiters.
fn rejects_loop_devices(filter: &[String]) -> bool {
    let concerns = |pattern: &&String| {
        let expression = pattern.get(2..pattern.len().saturating_sub(1)).unwrap_or_default();
        expression.contains("loop") || [".*", "/.*", "^/dev/.*", "/dev/.*"].contains(&expression)
    };
    filter.iter().find(concerns).is_some_and(|pattern| pattern.starts_with('r'))
}

/// Returns the loop devices from which loopfs chooses and on which other devices are built.
fn held(block: &Path) -> Vec<String> {
    let range = PoolOptions::default().range;
    let names = loop_devices(block);
    let ours = names.iter().filter(|name| loop_index(name).is_some_and(|index| range.contains(&index)));
    let holders = |name: &String| {
        let entries = fs::read_dir(block.join(name).join("holders")).into_iter().flatten().flatten();
        let holders: Vec<_> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        (!holders.is_empty()).then(|| format!("{name} ({})", holders.join(", ")))
    };
    ours.filter_map(holders).collect()
}

/// The largest `max_part` of the loop module that leaves loopfs only devices whose names have five digits, as the rule of udev and the
/// filter of LVM expect.
const MAX_PART: u32 = 31;

pub(super) fn judge(facts: &HostFacts, max_part: Option<u32>) -> Vec<Check> {
    vec![selinux(facts.label.as_deref()), udev_rule(facts, max_part), lvm_filter(facts)]
}

/// The policy of containers (container-selinux) confines their processes by the types `container_t` and others of such names.
fn selinux(label: Option<&str>) -> Check {
    const ID: &str = "selinux";
    let kind = label.and_then(|label| label.split(':').nth(2)).unwrap_or_default();
    if kind.starts_with("container_") && !kind.starts_with("container_runtime") {
        return Check::warning(
            ID,
            format!(
                "SELinux gives this process the type {kind}, which may not write to directories of the node"
            ),
            "give the container a type that may: seLinuxOptions.type spc_t in its securityContext, which the value seLinuxOptions of the \
             chart sets",
        );
    }
    match kind {
        "" => Check::ok(ID, "SELinux does not confine this process"),
        kind => Check::ok(ID, format!("the type of this process is {kind}, and not one of containers")),
    }
}

fn udev_rule(facts: &HostFacts, max_part: Option<u32>) -> Check {
    const ID: &str = "udev-rule";
    if !facts.held.is_empty() {
        return Check::warning(
            ID,
            format!(
                "devices are built on those of volumes: {}; they keep the loop devices after the pods have ended",
                facts.held.join(", ")
            ),
            "unless a pod has built them, install the rule that `loopfs data-dir udev-rule` prints, and remove them with `vgchange \
             --activate n VG` or `mdadm --stop /dev/mdN`",
        );
    }
    match facts.udev_rule {
        Some(true) if max_part.is_some_and(|parts| parts > MAX_PART) => Check::warning(
            ID,
            "with this max_part of the loop module, loopfs uses devices with shorter names than the rule of udev expects",
            format!("set the parameter max_part of the module to {MAX_PART} or less"),
        ),
        Some(true) => Check::ok(ID, "udev does not read the loop devices of volumes"),
        Some(false) => Check::warning(
            ID,
            "udev reads what the owners of Block volumes write, so LVM and mdadm activate what they find there",
            "run `loopfs data-dir udev-rule >/etc/udev/rules.d/59-loopfs.rules && udevadm control --reload`",
        ),
        None => {
            Check::not_checked(ID, "/run/udev does not exist: this is a container, or a node without udev")
                .with_remedy("check on the node")
        }
    }
}

fn lvm_filter(facts: &HostFacts) -> Check {
    const ID: &str = "lvm-filter";
    match facts.lvm_filter {
        Some(true) => Check::ok(ID, "LVM ignores the loop devices of volumes"),
        Some(false) => Check::warning(
            ID,
            "the commands of LVM read what the owners of Block volumes write, and find copies of the node's volume groups there",
            "append what `loopfs data-dir lvm-filter` prints to /etc/lvm/lvmlocal.conf",
        ),
        None if facts.udev_rule.is_some() => Check::ok(ID, "LVM is not installed"),
        None => Check::not_checked(ID, "/etc/lvm does not exist: this is a container, or a node without LVM")
            .with_remedy("check on the node"),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::preflight::Status;
    use crate::preflight::facts::tests::host;
    use crate::preflight::tests::assert_check;

    #[test]
    fn an_empty_file_masks_the_rule() {
        let root = tempfile::tempdir().unwrap();
        let directories = ["etc", "usr"].map(|name| root.path().join(name));
        directories.iter().for_each(|directory| fs::create_dir(directory).unwrap());
        assert!(!has_rule(&directories));
        let rule = include_str!("../../../examples/udev/59-loopfs.rules");
        fs::write(directories[1].join(RULE), rule).unwrap();
        assert!(has_rule(&directories));
        fs::write(directories[0].join(RULE), "").unwrap();
        assert!(!has_rule(&directories));
    }

    /// The commented lines are those of lvm.conf(5), which name the default of the distribution.
    #[rstest]
    #[case::default(
        "devices {\n\t# use_devicesfile = 0\n\t# global_filter = [ \"r|.*|\" ]\n}",
        "",
        false,
        Some(false)
    )]
    #[case::devices_file("devices {\n\t# use_devicesfile = 1\n}", "", true, Some(true))]
    #[case::no_devices_file("devices {\n\t# use_devicesfile = 1\n}", "", false, Some(false))]
    #[case::devices_file_off(
        "devices {\n\t# use_devicesfile = 1\n\tuse_devicesfile = 0\n}",
        "",
        true,
        Some(false)
    )]
    #[case::ours("", include_str!("../../../examples/lvm/global_filter.conf"), false, Some(true))]
    #[case::own("devices { global_filter = [\n\"a|^/dev/sd|\",\n\"r|.*|\"\n] }", "", false, Some(true))]
    #[case::accepts("devices { global_filter = [ \"a|.*|\", \"r|/dev/loop|\" ] }", "", false, Some(false))]
    #[case::local_accepts(
        "devices { global_filter = [ \"r|.*|\" ] }",
        "devices { global_filter=[\"a|.*|\"] }",
        false,
        Some(false)
    )]
    #[case::broken("global_filter = [ \"r\", \"\" ", "", false, Some(false))]
    fn lvm_ignores_what_it_rejects(
        #[case] configuration: &str,
        #[case] local: &str,
        #[case] listed: bool,
        #[case] expected: Option<bool>,
    ) {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(ignored_by_lvm(directory.path()), None);
        fs::write(directory.path().join("lvm.conf"), configuration).unwrap();
        fs::write(directory.path().join("lvmlocal.conf"), local).unwrap();
        if listed {
            fs::create_dir(directory.path().join("devices")).unwrap();
            fs::write(directory.path().join("devices/system.devices"), "").unwrap();
        }
        assert_eq!(ignored_by_lvm(directory.path()), expected);
    }

    #[test]
    fn devices_on_volumes_are_found() {
        let block = tempfile::tempdir().unwrap();
        for holder in ["loop7/holders/dm-1", "loop65537/holders/dm-0", "loop65536/holders"] {
            fs::create_dir_all(block.path().join(holder)).unwrap();
        }
        assert_eq!(held(block.path()), ["loop65537 (dm-0)"]);
    }

    /// The rule and the filter name the devices by the number of their digits.
    #[test]
    fn the_rules_match_the_indices() {
        let range = PoolOptions::default().range;
        let digits = "[0-9]".repeat(5);
        assert!(range.start >= 10_000, "{range:?}");
        let rule = include_str!("../../../examples/udev/59-loopfs.rules");
        assert!(rule.contains(&format!("KERNEL!=\"loop{digits}*\"")), "{rule}");
        let filter = include_str!("../../../examples/lvm/global_filter.conf");
        assert!(filter.contains(&format!("r|^/dev/loop{digits}+$|")), "{filter}");
    }

    #[rstest]
    #[case::confined("selinux", |f: &mut HostFacts| f.label = Some("system_u:system_r:container_t:s0:c1,c2".into()), Status::Warning, "spc_t")]
    #[case::unconfined("selinux", |f: &mut HostFacts| f.label = Some("system_u:system_r:spc_t:s0".into()), Status::Ok, "")]
    #[case::engine("selinux", |f: &mut HostFacts| f.label = Some("system_u:system_r:container_runtime_t:s0".into()), Status::Ok, "")]
    #[case::apparmor("selinux", |f: &mut HostFacts| f.label = Some("cri-containerd.apparmor.d (enforce)".into()), Status::Ok, "")]
    #[case::no_rule("udev-rule", |f: &mut HostFacts| f.udev_rule = Some(false), Status::Warning, "loopfs data-dir udev-rule")]
    #[case::no_udev("udev-rule", |f: &mut HostFacts| f.udev_rule = None, Status::NotChecked, "on the node")]
    #[case::held("udev-rule", |f: &mut HostFacts| f.held = vec!["loop65536 (dm-0)".into()], Status::Warning, "vgchange --activate n")]
    #[case::held_in_a_container("udev-rule", |f: &mut HostFacts| {
        (f.udev_rule, f.held) = (None, vec!["loop65536 (md127)".into()]);
    }, Status::Warning, "mdadm --stop")]
    #[case::no_filter("lvm-filter", |f: &mut HostFacts| f.lvm_filter = Some(false), Status::Warning, "lvmlocal.conf")]
    #[case::no_lvm("lvm-filter", |f: &mut HostFacts| f.lvm_filter = None, Status::Ok, "")]
    #[case::unseen_lvm("lvm-filter", |f: &mut HostFacts| {
        (f.udev_rule, f.lvm_filter) = (None, None);
    }, Status::NotChecked, "on the node")]
    fn each_fact_decides_its_status(
        #[case] id: &str,
        #[case] change: fn(&mut HostFacts),
        #[case] status: Status,
        #[case] remedy: &str,
    ) {
        let mut facts = host();
        change(&mut facts);
        assert_check(&judge(&facts, Some(0)), id, status, remedy);
    }

    #[test]
    fn short_names_escape_the_rule() {
        let status = |parts| judge(&host(), Some(parts))[1].status;
        assert_eq!((status(31), status(32)), (Status::Ok, Status::Warning));
    }
}
