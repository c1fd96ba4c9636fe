//! Mount options of a storage class, as flags of a bind mount.

use loopfs::{AccessTime, MountFlags};

use super::{InvalidRequest, Result};

const FIELD: &str = "mount_flags";

/// As a message lists them.
const ALLOWED: &str =
    "ro, rw, nosuid, suid, nodev, dev, noexec, exec, noatime, relatime, strictatime, nodiratime, diratime";

/// The properties an option may set, each at most one way.
#[derive(Default)]
struct Choices<'a> {
    read_only: Choice<'a, bool>,
    nosuid: Choice<'a, bool>,
    nodev: Choice<'a, bool>,
    noexec: Choice<'a, bool>,
    access_time: Choice<'a, AccessTime>,
    nodiratime: Choice<'a, bool>,
}

struct Choice<'a, T>(Option<(&'a str, T)>);

impl<T> Default for Choice<'_, T> {
    fn default() -> Self {
        Self(None)
    }
}

impl<'a, T: Copy + PartialEq> Choice<'a, T> {
    fn set(&mut self, option: &'a str, value: T) -> Result<()> {
        match self.0 {
            Some((earlier, other)) if other != value => {
                Err(InvalidRequest::new(FIELD, format!("{earlier} and {option} contradict each other")))
            }
            _ => {
                self.0 = Some((option, value));
                Ok(())
            }
        }
    }

    fn value(&self) -> Option<T> {
        self.0.map(|(_, value)| value)
    }
}

/// What was not asked is as in any plain mount: `rw,suid,dev,exec,relatime`, whatever the file system that holds the
/// volumes is mounted with.
pub(super) fn read(options: &[String]) -> Result<MountFlags> {
    let mut choices = Choices::default();
    for option in options {
        let option = option.as_str();
        match option {
            "ro" => choices.read_only.set(option, true),
            "rw" => choices.read_only.set(option, false),
            "nosuid" => choices.nosuid.set(option, true),
            "suid" => choices.nosuid.set(option, false),
            "nodev" => choices.nodev.set(option, true),
            "dev" => choices.nodev.set(option, false),
            "noexec" => choices.noexec.set(option, true),
            "exec" => choices.noexec.set(option, false),
            "noatime" => choices.access_time.set(option, AccessTime::Never),
            "relatime" => choices.access_time.set(option, AccessTime::Relative),
            "strictatime" => choices.access_time.set(option, AccessTime::Strict),
            "nodiratime" => choices.nodiratime.set(option, true),
            "diratime" => choices.nodiratime.set(option, false),
            // The value is not shown: the specification lets mount flags hold credentials.
            _ => Err(InvalidRequest::new(FIELD, format!("an option is none of: {ALLOWED}"))),
        }?;
    }
    Ok(MountFlags {
        read_only: choices.read_only.value().unwrap_or_default(),
        nosuid: choices.nosuid.value().unwrap_or_default(),
        nodev: choices.nodev.value().unwrap_or_default(),
        noexec: choices.noexec.value().unwrap_or_default(),
        access_time: choices.access_time.value().unwrap_or_default(),
        nodiratime: choices.nodiratime.value().unwrap_or_default(),
    })
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn flags(options: &str) -> Result<MountFlags> {
        let options: Vec<String> =
            options.split(',').filter(|option| !option.is_empty()).map(str::to_owned).collect();
        read(&options)
    }

    #[rstest]
    #[case::nothing_asked("", MountFlags::default())]
    #[case::opposites_of_flags("rw,suid,dev,exec,relatime,diratime", MountFlags::default())]
    #[case::hardened("nosuid,nodev,noexec", MountFlags { nosuid: true, nodev: true, noexec: true, ..MountFlags::default() })]
    #[case::read_only("ro", MountFlags { read_only: true, ..MountFlags::default() })]
    #[case::repeated("nodev,nodev", MountFlags { nodev: true, ..MountFlags::default() })]
    #[case::times("noatime,nodiratime", MountFlags { access_time: AccessTime::Never, nodiratime: true, ..MountFlags::default() })]
    #[case::strict("strictatime", MountFlags { access_time: AccessTime::Strict, ..MountFlags::default() })]
    fn understood(#[case] options: &str, #[case] expected: MountFlags) {
        assert_eq!(flags(options), Ok(expected));
    }

    #[rstest]
    #[case::contradiction("ro,rw")]
    #[case::contradiction_of_times("noatime,relatime")]
    #[case::unknown("discard")]
    #[case::bind("bind")]
    #[case::upper_case("RO")]
    #[case::space(" ro")]
    #[case::quota("prjquota")]
    fn refused(#[case] options: &str) {
        assert!(flags(options).is_err());
    }

    #[test]
    fn a_list_in_one_option_is_not_taken_apart() {
        assert!(read(&["ro,nosuid".to_owned()]).is_err());
    }

    #[test]
    fn a_refusal_lists_what_is_allowed_and_not_what_was_given() {
        let message = flags("password=x").unwrap_err().to_string();
        assert!(message.contains("nosuid") && !message.contains("password"), "{message}");
    }
}
