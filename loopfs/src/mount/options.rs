//! Mount options as words: those of mount(8) that a bind mount has flags for.

/// When reading a file updates its access time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AccessTime {
    /// After a write, or once a day: the kernel's default.
    #[default]
    Relative,
    /// Never.
    Never,
    /// Always.
    Strict,
}

/// Flags of the bind mount itself, not of its source (mount_setattr(2)). All are set
/// as they are here: the flags of the source mount are not inherited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MountFlags {
    /// Refuse writes with EROFS.
    pub read_only: bool,
    /// Ignore set-user-id bits and file capabilities.
    pub nosuid: bool,
    /// Refuse to open device nodes.
    pub nodev: bool,
    /// Refuse to execute files.
    pub noexec: bool,
    /// When access times of files are updated.
    pub access_time: AccessTime,
    /// Do not update access times of directories.
    pub nodiratime: bool,
}

/// Why mount options were not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MountOptionError {
    /// The error does not show which option, because a caller may have put credentials there.
    #[error("an option is none of: {}", MountFlags::OPTIONS)]
    Unknown,
    /// Two say the opposite of each other.
    #[error("{earlier} and {later} contradict each other")]
    Contradiction {
        /// The first of the two.
        earlier: &'static str,
        /// The other.
        later: &'static str,
    },
}

/// What a group of options sets. Two different options of a group contradict each other.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Property {
    Writing,
    SetUserId,
    Devices,
    Execution,
    AccessTime,
    DirectoryAccessTime,
}

type MountOption = (&'static str, Property, fn(&mut MountFlags));

/// All options. Those without an effect are the defaults.
const KNOWN: [MountOption; 13] = [
    ("ro", Property::Writing, |flags| flags.read_only = true),
    ("rw", Property::Writing, |_default| {}),
    ("nosuid", Property::SetUserId, |flags| flags.nosuid = true),
    ("suid", Property::SetUserId, |_default| {}),
    ("nodev", Property::Devices, |flags| flags.nodev = true),
    ("dev", Property::Devices, |_default| {}),
    ("noexec", Property::Execution, |flags| flags.noexec = true),
    ("exec", Property::Execution, |_default| {}),
    ("noatime", Property::AccessTime, |flags| flags.access_time = AccessTime::Never),
    ("relatime", Property::AccessTime, |_default| {}),
    ("strictatime", Property::AccessTime, |flags| flags.access_time = AccessTime::Strict),
    ("nodiratime", Property::DirectoryAccessTime, |flags| flags.nodiratime = true),
    ("diratime", Property::DirectoryAccessTime, |_default| {}),
];

impl MountFlags {
    /// All words that [`from_options`](Self::from_options) knows, for people.
    pub const OPTIONS: &str = "ro, rw, nosuid, suid, nodev, dev, noexec, exec, noatime, relatime, strictatime, nodiratime, diratime";

    /// Parses options, one word each. Properties without an option get the defaults of mount(8), `rw,suid,dev,exec,relatime`,
    /// even if the source file system is mounted with other options.
    ///
    /// # Errors
    /// [`MountOptionError`]: a word that is none of [`OPTIONS`](Self::OPTIONS), or two that contradict each other.
    pub fn from_options<S: AsRef<str>>(options: &[S]) -> Result<MountFlags, MountOptionError> {
        let (mut flags, mut seen) = (MountFlags::default(), Vec::new());
        for option in options {
            let is_it = |known: &&MountOption| known.0 == option.as_ref();
            let &(later, property, set) = KNOWN.iter().find(is_it).ok_or(MountOptionError::Unknown)?;
            let contradicts = |(earlier, of): &&(&str, Property)| *of == property && *earlier != later;
            if let Some(&(earlier, _)) = seen.iter().find(contradicts) {
                return Err(MountOptionError::Contradiction { earlier, later });
            }
            seen.push((later, property));
            set(&mut flags);
        }
        Ok(flags)
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn flags(options: &str) -> Result<MountFlags, MountOptionError> {
        let options: Vec<&str> = options.split(',').filter(|option| !option.is_empty()).collect();
        MountFlags::from_options(&options)
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
    fn a_comma_separated_option_is_unknown() {
        assert_eq!(MountFlags::from_options(&["ro,nosuid"]), Err(MountOptionError::Unknown));
    }

    /// The refused option can be a password, so the message must not repeat it.
    #[test]
    fn errors_list_only_allowed_options() {
        let message = flags("password=x").unwrap_err().to_string();
        assert!(message.contains("nosuid") && !message.contains("password"), "{message}");
    }

    #[test]
    fn each_listed_option_is_known() {
        for word in MountFlags::OPTIONS.split(", ") {
            assert!(MountFlags::from_options(&[word]).is_ok(), "{word}");
        }
    }
}
