//! Settings of a volume beside its kind and size: their names, their allowed values, and their comparison with an existing volume.

use std::fmt;
use std::num::NonZeroU64;
use std::ops::RangeInclusive;
use std::os::fd::AsFd;

use super::id::VolumeId;
use super::on_disk::{DirectorySpec, Image};
use super::source::ContentSource;
use super::spec::{ImageSpec, LogicalBlockSize, Provisioning, VolumeSpec};
use crate::error::{Context, Error, ErrorKind, Result};
use crate::loop_device::DirectIo;
use crate::sys::statx;

const BYTES_PER_INODE: &str = "bytesPerInode";
const DIRECT_IO: &str = "directIO";
const LOGICAL_BLOCK_SIZE: &str = "logicalBlockSize";
const PROVISIONING: &str = "provisioning";

/// An inode takes 512 bytes on disk, so a smaller ratio would allow more inodes than fit into the file system. With a larger
/// one, a volume of ordinary size could hold no files at all.
const BYTES_PER_INODE_RANGE: RangeInclusive<u64> = 512..=1 << 30;

/// A setting that [`VolumeSpec::set`] accepts.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Setting {
    /// The name.
    pub name: &'static str,
    /// The allowed values, as text for people.
    pub allowed: &'static str,
    /// Sets an allowed value. Returns `None` if the value is not allowed; the specification is unchanged then.
    set: fn(&mut VolumeSpec, &str) -> Option<()>,
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name, self.allowed)
    }
}

/// Why a setting was rejected: its name is unknown, or its value is not allowed. [`VolumeSpec::SETTINGS`] lists what is allowed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SettingError(String);

impl VolumeSpec {
    /// All settings that [`set`](Self::set) accepts, in the order of their names.
    pub const SETTINGS: &[Setting] = &[
        Setting {
            name: BYTES_PER_INODE,
            allowed: "bytes of capacity per inode, a number from 512 to 1073741824",
            set: |spec, value| bytes_per_inode(value).map(|ratio| spec.directory.bytes_per_inode = ratio),
        },
        Setting {
            name: DIRECT_IO,
            allowed: "required or preferred",
            set: |spec, value| {
                let direct_io = DirectIo::parse(value).filter(|direct_io| *direct_io != DirectIo::Off);
                direct_io.map(|direct_io| spec.image.direct_io = direct_io)
            },
        },
        Setting {
            name: LOGICAL_BLOCK_SIZE,
            allowed: "512 or 4096",
            set: |spec, value| {
                LogicalBlockSize::parse(value).map(|size| spec.image.logical_block_size = Some(size))
            },
        },
        Setting {
            name: PROVISIONING,
            allowed: "thick or thin",
            set: |spec, value| Provisioning::parse(value).map(|when| spec.image.provisioning = when),
        },
    ];

    /// Sets a setting by its name, for configuration outside the program. A setting that does not apply to the kind of volume is
    /// validated, but has no effect.
    ///
    /// # Errors
    /// [`SettingError`]; the specification is unchanged then.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), SettingError> {
        let known = Self::SETTINGS.iter().find(|setting| setting.name == name);
        let setting = known.ok_or_else(|| SettingError(format!("unknown parameter {name:?}")))?;
        (setting.set)(self, value).ok_or_else(|| SettingError(format!("{name} is {value:?}")))
    }
}

fn bytes_per_inode(value: &str) -> Option<NonZeroU64> {
    // `parse` alone would also take "+4096".
    let digits = value.bytes().all(|byte| byte.is_ascii_digit());
    let ratio = digits.then(|| value.parse::<NonZeroU64>().ok()).flatten()?;
    BYTES_PER_INODE_RANGE.contains(&ratio.get()).then_some(ratio)
}

/// Returns how a setting differs from the requested one, or `None` if it does not.
fn difference<T: PartialEq + fmt::Display>(name: &str, found: T, requested: T) -> Option<String> {
    (found != requested).then(|| format!("{name} is {found}, but {requested} is requested"))
}

impl DirectorySpec {
    /// Returns how the recorded settings differ from the requested ones, or `None` if they do not.
    pub(super) fn differs(self, requested: Self) -> Option<String> {
        let Self { bytes_per_inode } = self;
        difference(BYTES_PER_INODE, bytes_per_inode, requested.bytes_per_inode)
    }
}

impl Image {
    /// Resolves the settings of an empty image from the requested ones and the properties of the file.
    pub(super) fn resolve(spec: ImageSpec, image: impl AsFd, id: &VolumeId) -> Result<Self> {
        let ImageSpec { direct_io, logical_block_size, provisioning } = spec;
        if direct_io == DirectIo::Off {
            let cause = format!("its {DIRECT_IO} is off");
            return Err(Error::new(ErrorKind::InvalidInput, "create volume", id, cause)
                .with_remedy("it can be required or preferred"));
        }
        let unit = statx::direct_io_alignment(image).context("statx the image of volume", id)?;
        let least = LogicalBlockSize::at_least(unit);
        let logical_block_size = logical_block_size.unwrap_or(least);
        if direct_io == DirectIo::Required && logical_block_size.bytes() < unit {
            let cause = format!(
                "{DIRECT_IO} is required and {LOGICAL_BLOCK_SIZE} is {logical_block_size}, and the file system takes direct \
                 I/O in units of {unit} bytes"
            );
            return Err(Error::new(ErrorKind::Unsupported, "create volume", id, cause)
                .with_remedy(format!("request {LOGICAL_BLOCK_SIZE} {least}, or {DIRECT_IO} preferred")));
        }
        Ok(Self { direct_io, logical_block_size, provisioning })
    }

    /// Resolves the settings of a clone of `self`, the image of `source`. The clone has the same block size, which its content depends
    /// on.
    pub(super) fn resolve_clone(
        self,
        source: ContentSource<'_>,
        spec: ImageSpec,
        id: &VolumeId,
    ) -> Result<Self> {
        self.check_sharing(source)?;
        let ImageSpec { direct_io, logical_block_size, provisioning } = spec;
        if let Some(requested) = logical_block_size.filter(|requested| *requested != self.logical_block_size)
        {
            let detail = format!(
                "{LOGICAL_BLOCK_SIZE} {requested} is requested, but the content of {source} was written for {}",
                self.logical_block_size
            );
            return Err(Error::new(ErrorKind::InvalidInput, "clone volume", id, detail));
        }
        let clone = Self { direct_io, logical_block_size: self.logical_block_size, provisioning };
        clone.check_sharing(ContentSource::Volume(id))?;
        Ok(clone)
    }

    /// Checks that the image can still be attached with its settings when it shares blocks with another one.
    pub(super) fn check_sharing(self, entry: ContentSource<'_>) -> Result<()> {
        if self.direct_io == DirectIo::Preferred || self.logical_block_size != LogicalBlockSize::B512 {
            return Ok(());
        }
        let cause = format!(
            "its {DIRECT_IO} is required and its {LOGICAL_BLOCK_SIZE} 512, and from Linux 6.15 on an image that shares blocks \
             takes direct I/O in units of 4096 bytes only"
        );
        Err(Error::new(ErrorKind::Unsupported, "share the blocks of", entry, cause).with_remedy(format!(
            "create volumes that are cloned or snapshotted with {DIRECT_IO} preferred, or with {LOGICAL_BLOCK_SIZE} 4096"
        )))
    }

    /// Returns how the settings differ from the requested ones, or `None` if they do not.
    pub(super) fn differs(self, requested: ImageSpec) -> Option<String> {
        let Self { direct_io, logical_block_size, provisioning } = self;
        difference(DIRECT_IO, direct_io.as_str(), requested.direct_io.as_str())
            .or_else(|| difference(PROVISIONING, provisioning.as_str(), requested.provisioning.as_str()))
            .or_else(|| difference(LOGICAL_BLOCK_SIZE, logical_block_size, requested.logical_block_size?))
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::units::Bytes;
    use crate::volume_store::spec::VolumeKind;

    fn spec() -> VolumeSpec {
        VolumeSpec::new(VolumeKind::Block, Bytes::MIB)
    }

    fn image(direct_io: DirectIo, logical_block_size: LogicalBlockSize) -> Image {
        Image { direct_io, logical_block_size, provisioning: Provisioning::Thick }
    }

    #[rstest]
    #[case::zero("bytesPerInode", "0")]
    #[case::too_dense("bytesPerInode", "511")]
    #[case::too_sparse("bytesPerInode", "1073741825")]
    #[case::negative("bytesPerInode", "-2048")]
    #[case::signed("bytesPerInode", "+2048")]
    #[case::quantity("bytesPerInode", "2Ki")]
    #[case::no_number("bytesPerInode", "")]
    #[case::overflow("bytesPerInode", "99999999999999999999999")]
    #[case::boolean("directIO", "true")]
    #[case::capital("directIO", "Required")]
    #[case::space("directIO", "required ")]
    #[case::no_sector("logicalBlockSize", "1024")]
    #[case::octal("logicalBlockSize", "0512")]
    #[case::unit("logicalBlockSize", "4Ki")]
    #[case::nothing("provisioning", "")]
    #[case::nul("provisioning", "thin\0")]
    fn a_value_is_rejected(#[case] name: &str, #[case] value: &str) {
        let mut changed = spec();
        let error = changed.set(name, value).unwrap_err();
        assert_eq!(error.to_string(), format!("{name} is {value:?}"));
        assert_eq!(changed, spec());
    }

    #[test]
    fn names_of_settings_are_case_sensitive() {
        for name in ["", "directio", "directIO ", "bytesPerInode\0", "fsType"] {
            let error = spec().set(name, "512").unwrap_err();
            assert_eq!(error.to_string(), format!("unknown parameter {name:?}"));
        }
    }

    /// Both documented values are accepted, and make a difference: a setting without an effect fails too.
    #[test]
    fn each_documented_value_is_accepted() {
        let names: Vec<_> = VolumeSpec::SETTINGS.iter().map(|setting| setting.name).collect();
        assert!(names.is_sorted());
        for setting in VolumeSpec::SETTINGS {
            let set = |value: &str| {
                let mut changed = spec();
                changed.set(setting.name, value).map(|()| changed)
            };
            let words: Vec<_> = setting.allowed.split(' ').collect();
            let (one, other) = match words[..] {
                [one, "or", other] => (one, other),
                [.., "a", "number", "from", least, "to", most] => {
                    let [below, above] =
                        [least.parse::<i64>().unwrap() - 1, most.parse::<i64>().unwrap() + 1];
                    for outside in [below, above] {
                        assert!(set(&outside.to_string()).is_err(), "{setting} accepts {outside}");
                    }
                    (least, most)
                }
                _ => panic!("{setting}: end with `a number from A to B`, or write `A or B`"),
            };
            assert_ne!(set(one).unwrap(), set(other).unwrap(), "{setting} has no effect");
        }
    }

    #[rstest]
    #[case::as_asked(ImageSpec::default(), None)]
    #[case::named(ImageSpec { logical_block_size: Some(LogicalBlockSize::B512), ..ImageSpec::default() }, None)]
    #[case::blocks(
        ImageSpec { logical_block_size: Some(LogicalBlockSize::B4096), ..ImageSpec::default() },
        Some("logicalBlockSize is 512, but 4096 is requested")
    )]
    #[case::direct_io(
        ImageSpec { direct_io: DirectIo::Required, ..ImageSpec::default() },
        Some("directIO is preferred, but required is requested")
    )]
    #[case::provisioning(
        ImageSpec { provisioning: Provisioning::Thin, ..ImageSpec::default() },
        Some("provisioning is thick, but thin is requested")
    )]
    fn a_difference_names_both_values(#[case] requested: ImageSpec, #[case] expected: Option<&str>) {
        let found = image(DirectIo::Preferred, LogicalBlockSize::B512);
        assert_eq!(found.differs(requested).as_deref(), expected);
    }

    #[test]
    fn another_inode_ratio_is_a_difference() {
        let found = DirectorySpec::default();
        let requested = DirectorySpec { bytes_per_inode: NonZeroU64::MIN };
        assert_eq!(found.differs(found), None);
        assert_eq!(found.differs(requested).unwrap(), "bytesPerInode is 16384, but 1 is requested");
    }

    /// A file with shared blocks accepts direct I/O only in whole blocks of the file system.
    #[test]
    fn direct_io_limits_block_sharing() {
        let id = VolumeId::parse("clone").unwrap();
        let spec = ImageSpec { direct_io: DirectIo::Required, ..ImageSpec::default() };
        let clone_of =
            |size| image(DirectIo::Preferred, size).resolve_clone(ContentSource::Volume(&id), spec, &id);
        assert_eq!(clone_of(LogicalBlockSize::B4096).unwrap().direct_io, DirectIo::Required);
        assert_eq!(clone_of(LogicalBlockSize::B512).unwrap_err().kind(), ErrorKind::Unsupported);
    }

    #[test]
    fn a_clone_keeps_its_block_size() {
        let id = VolumeId::parse("clone").unwrap();
        let requested =
            ImageSpec { logical_block_size: Some(LogicalBlockSize::B4096), ..ImageSpec::default() };
        let of_source = image(DirectIo::Preferred, LogicalBlockSize::B512);
        let error = of_source.resolve_clone(ContentSource::Volume(&id), requested, &id).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
        assert!(error.to_string().contains("written for 512"), "{error}");
    }
}
