//! The command line of losetup(8), with the error messages of getopt_long(3).

use std::ffi::{OsStr, OsString};
use std::num::NonZeroU64;
use std::os::unix::ffi::OsStrExt;

use lexopt::{Arg, Parser};

use super::columns::{COLUMNS, Column, ListFormat};
use super::failure::{LosetupFailure, os_text};
use super::options::{Id, OPTIONS, Opt, Value};
use super::size;

/// What the command line requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum LosetupAction {
    #[default]
    Help,
    Version,
    Create {
        device: Option<OsString>,
        file: OsString,
    },
    Detach(Vec<OsString>),
    DetachAll,
    /// Lists all devices, or those of a file.
    Show(Option<OsString>),
    ShowOne(OsString),
    FindFree,
    SetCapacity(OsString),
    SetDirectIo(OsString, bool),
    SetBlockSize(OsString, u64),
    Remove(Vec<OsString>),
}

/// A parsed command line.
#[derive(Clone, Debug, Default)]
pub(crate) struct LosetupRequest {
    pub(crate) action: LosetupAction,
    /// The columns of the table; `None` prints the format without columns.
    pub(crate) columns: Option<Vec<&'static Column>>,
    pub(crate) format: ListFormat,
    pub(crate) offset: Option<u64>,
    pub(crate) size_limit: Option<NonZeroU64>,
    pub(crate) block_size: Option<u64>,
    pub(crate) partition_scan: bool,
    pub(crate) read_only: bool,
    pub(crate) direct_io: bool,
    pub(crate) no_overlap: bool,
    pub(crate) show: bool,
    pub(crate) name: Option<OsString>,
}

/// Options that exclude each other. The order is that of the message.
const EXCLUSIVE: [&[Id]; 4] = [
    &[Id::DetachAll, Id::All, Id::SetCapacity, Id::Detach, Id::Find, Id::Associated],
    &[Id::DetachAll, Id::SetCapacity, Id::Detach, Id::Find, Id::List],
    &[Id::Json, Id::Raw],
    // util-linux 2.42 has `--remove` in the first two groups, whose messages are those of 2.41.
    &[Id::DetachAll, Id::All, Id::SetCapacity, Id::Detach, Id::Find, Id::Associated, Id::List, Id::Remove],
];

const DEFAULT_COLUMNS: [&str; 8] =
    ["NAME", "SIZELIMIT", "OFFSET", "AUTOCLEAR", "RO", "BACK-FILE", "DIO", "LOG-SEC"];

/// The options of a command line, before they are combined.
#[derive(Debug, Default)]
struct Given {
    seen: Vec<Id>,
    operands: Vec<OsString>,
    device: Option<OsString>,
    associated: Option<OsString>,
    output: Option<OsString>,
    offset: Option<u64>,
    size_limit: u64,
    block_size: Option<u64>,
    direct_io: Option<bool>,
    /// `--direct-io` or `--direct-io=on` was given, even if `--direct-io=off` follows.
    direct_io_requested: bool,
    name: Option<OsString>,
}

impl Given {
    fn has(&self, id: Id) -> bool {
        self.seen.contains(&id)
    }
}

/// Parses the arguments that follow the name of the program.
pub(crate) fn parse(args: impl IntoIterator<Item = OsString>) -> Result<LosetupRequest, LosetupFailure> {
    let args: Vec<OsString> = args.into_iter().collect();
    let count = args.len();
    let mut parser = Parser::from_args(args);
    // getopt reads `-o=5` as the value `=5`.
    parser.set_short_equals(false);
    let mut given = Given::default();
    loop {
        let argument = match parser.next() {
            Ok(None) => break,
            Ok(Some(argument)) => argument,
            Err(error) => return Err(LosetupFailure::usage(error.to_string())),
        };
        let (option, long) = match argument {
            Arg::Value(operand) => {
                given.operands.push(operand);
                continue;
            }
            Arg::Short(letter) => (by_letter(letter)?, false),
            Arg::Long(name) => (by_prefix(name)?, true),
        };
        let value = match option.value {
            Value::Required => Some(parser.value().map_err(|_missing| missing_value(option, long))?),
            Value::Optional => parser.optional_value(),
            Value::None if long && parser.optional_value().is_some() => {
                return Err(LosetupFailure::usage(format!(
                    "option '--{}' doesn't allow an argument",
                    option.long
                )));
            }
            Value::None => None,
        };
        check_exclusive(&given.seen, option.id)?;
        given.seen.push(option.id);
        match option.id {
            Id::Help => return Ok(only(LosetupAction::Help)),
            Id::Version => return Ok(only(LosetupAction::Version)),
            id => given.take(id, value.unwrap_or_default())?,
        }
    }
    given.into_request(count)
}

fn only(action: LosetupAction) -> LosetupRequest {
    LosetupRequest { action, ..LosetupRequest::default() }
}

fn by_letter(letter: char) -> Result<&'static Opt, LosetupFailure> {
    let option = OPTIONS.iter().find(|option| option.short == Some(letter));
    option.ok_or_else(|| LosetupFailure::usage(format!("invalid option -- '{letter}'")))
}

fn by_prefix(name: &str) -> Result<&'static Opt, LosetupFailure> {
    if let Some(option) = OPTIONS.iter().find(|option| option.long == name) {
        return Ok(option);
    }
    let mut matching: Vec<&Opt> = OPTIONS.iter().filter(|option| option.long.starts_with(name)).collect();
    // `--re` is `--read-only` in util-linux up to 2.41, which has no `--remove`.
    if matching.len() > 1 {
        matching.retain(|option| option.id != Id::Remove);
    }
    match matching[..] {
        [] => Err(LosetupFailure::usage(format!("unrecognized option '--{name}'"))),
        [option] => Ok(option),
        _ => {
            let names: String = matching.iter().map(|option| format!(" '--{}'", option.long)).collect();
            Err(LosetupFailure::usage(format!("option '--{name}' is ambiguous; possibilities:{names}")))
        }
    }
}

fn missing_value(option: &Opt, long: bool) -> LosetupFailure {
    match option.short {
        Some(letter) if !long => LosetupFailure::usage(format!("option requires an argument -- '{letter}'")),
        _ => LosetupFailure::usage(format!("option '--{}' requires an argument", option.long)),
    }
}

fn check_exclusive(seen: &[Id], id: Id) -> Result<(), LosetupFailure> {
    let excludes = |row: &[Id], other: &Id| match row.contains(&Id::Remove) {
        true => *other != id && (id == Id::Remove || *other == Id::Remove),
        false => *other != id,
    };
    let conflicts = |row: &&&[Id]| {
        row.contains(&id) && row.iter().any(|other| excludes(row, other) && seen.contains(other))
    };
    let Some(row) = EXCLUSIVE.iter().find(conflicts) else { return Ok(()) };
    let long = |id: &Id| OPTIONS.iter().find(|option| option.id == *id).map(|option| option.long);
    let names: String = row.iter().filter_map(long).map(|long| format!(" --{long}")).collect();
    Err(LosetupFailure::message(format!("mutually exclusive arguments:{names}")))
}

impl Given {
    fn take(&mut self, id: Id, value: OsString) -> Result<(), LosetupFailure> {
        match id {
            Id::SetCapacity | Id::Detach => self.device = Some(value),
            Id::Associated => self.associated = Some(value),
            Id::Output => self.output = Some(value),
            Id::Offset => self.offset = Some(parse_size(&value, "failed to parse offset")?),
            Id::SizeLimit => self.size_limit = parse_size(&value, "failed to parse size")?,
            Id::SectorSize => {
                self.block_size = Some(parse_size(&value, "failed to parse logical block size")?);
            }
            Id::DirectIo => {
                let enabled = match value.as_bytes() {
                    b"" | b"on" => true,
                    b"off" => false,
                    _ => {
                        return Err(LosetupFailure::message(format!(
                            "argument error: '{}'",
                            os_text(&value)
                        )));
                    }
                };
                self.direct_io = Some(enabled);
                self.direct_io_requested |= enabled;
            }
            Id::LoopRef => self.name = Some(value),
            _ => {}
        }
        Ok(())
    }

    fn into_request(mut self, count: usize) -> Result<LosetupRequest, LosetupFailure> {
        let format = ListFormat {
            no_headings: self.has(Id::NoHeadings),
            raw: self.has(Id::Raw),
            json: self.has(Id::Json),
        };
        let mut list = self.has(Id::List) || self.has(Id::Output) || self.has(Id::OutputAll);
        let action = self.action(count, &mut list)?;
        let creates = matches!(action, LosetupAction::Create { .. });
        // `--direct-io` of a bound device is an action of its own.
        let direct_io = self.direct_io_requested && !matches!(action, LosetupAction::SetDirectIo(..));
        let setup_only = self.size_limit != 0
            || direct_io
            || [Id::ReadOnly, Id::PartScan, Id::Show].iter().any(|id| self.has(*id));
        if !creates && setup_only {
            return Err(LosetupFailure::message(
                "the options --{sizelimit,partscan,read-only,show} are allowed during loop device setup only",
            ));
        }
        if self.offset.is_some() && !creates && !matches!(action, LosetupAction::Show(Some(_))) {
            return Err(LosetupFailure::message("the option --offset is not allowed in this context"));
        }
        let columns = self.columns(list)?;
        Ok(LosetupRequest {
            action,
            columns,
            format,
            offset: self.offset,
            size_limit: NonZeroU64::new(self.size_limit),
            block_size: self.block_size,
            partition_scan: self.has(Id::PartScan),
            read_only: self.has(Id::ReadOnly),
            direct_io,
            no_overlap: self.has(Id::NoOverlap),
            show: self.has(Id::Show),
            name: self.name,
        })
    }

    /// Decides on the action. Sets `list` if the command line has only options of output.
    fn action(&mut self, count: usize, list: &mut bool) -> Result<LosetupAction, LosetupFailure> {
        let mut operands = std::mem::take(&mut self.operands).into_iter();
        let no_device = || LosetupFailure::message("no loop device specified");
        let acts = |id: &&Id| {
            matches!(
                id,
                Id::All
                    | Id::SetCapacity
                    | Id::Detach
                    | Id::DetachAll
                    | Id::Find
                    | Id::Associated
                    | Id::Remove
            )
        };
        let action = self.seen.iter().rev().find(acts);
        let format_only = count == 1 && (self.has(Id::Raw) || self.has(Id::Json));
        if action.is_none() && (count == 0 || format_only) {
            *list = true;
            return Ok(LosetupAction::Show(None));
        }
        match action {
            Some(Id::All | Id::Associated) => return Ok(LosetupAction::Show(self.associated.take())),
            Some(Id::SetCapacity) => {
                return self.device.take().map(LosetupAction::SetCapacity).ok_or_else(no_device);
            }
            Some(Id::Detach) => {
                return Ok(LosetupAction::Detach(self.device.take().into_iter().chain(operands).collect()));
            }
            Some(Id::DetachAll) => return Ok(LosetupAction::DetachAll),
            Some(Id::Remove) if operands.len() == 0 => return Err(no_device()),
            Some(Id::Remove) => return Ok(LosetupAction::Remove(operands.collect())),
            Some(Id::Find) => {
                let Some(file) = operands.next() else { return Ok(LosetupAction::FindFree) };
                if operands.next().is_some() {
                    return Err(LosetupFailure::message("unexpected arguments"));
                }
                return Ok(LosetupAction::Create { device: None, file });
            }
            _ => {}
        }
        if *list && operands.len() == 0 {
            return Ok(LosetupAction::Show(None));
        }
        let device = operands.next().ok_or_else(no_device)?;
        if let Some(file) = operands.next() {
            return Ok(LosetupAction::Create { device: Some(device), file });
        }
        Ok(match (self.direct_io, self.block_size) {
            (Some(enabled), _) => LosetupAction::SetDirectIo(device, enabled),
            (None, Some(size)) => LosetupAction::SetBlockSize(device, size),
            (None, None) => LosetupAction::ShowOne(device),
        })
    }

    fn columns(&self, list: bool) -> Result<Option<Vec<&'static Column>>, LosetupFailure> {
        let mut columns = match (list, self.has(Id::OutputAll)) {
            (false, _) => return Ok(None),
            (true, true) => COLUMNS.iter().collect(),
            (true, false) => DEFAULT_COLUMNS.into_iter().filter_map(Column::titled).collect(),
        };
        let Some(output) = &self.output else { return Ok(Some(columns)) };
        let output = os_text(output);
        let names = match output.strip_prefix('+') {
            Some(more) => more,
            None => {
                columns.clear();
                &output
            }
        };
        for name in names.split(',') {
            if name.is_empty() {
                return Err(LosetupFailure::silent());
            }
            let unknown = || LosetupFailure::message(format!("unknown column: {name}"));
            columns.push(Column::titled(name).ok_or_else(unknown)?);
        }
        Ok(Some(columns))
    }
}

fn parse_size(text: &OsStr, failure: &str) -> Result<u64, LosetupFailure> {
    size::parse(text.as_bytes())
        .map_err(|errno| LosetupFailure::os(format!("{failure}: '{}'", os_text(text)), errno as i32))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn parsed(args: &[&str]) -> Result<LosetupRequest, LosetupFailure> {
        parse(args.iter().map(OsString::from))
    }

    /// The kernel tests compare further command lines, and those that are refused, with util-linux.
    #[rstest]
    #[case::list(&["-l", "-n"], LosetupAction::Show(None))]
    #[case::prefix(&["--assoc=f"], LosetupAction::Show(Some("f".into())))]
    #[case::permuted(&["f", "-f", "--show"], LosetupAction::Create { device: None, file: "f".into() })]
    #[case::cluster(&["-fP", "f"], LosetupAction::Create { device: None, file: "f".into() })]
    #[case::end_of_options(&["-f", "--", "-x"], LosetupAction::Create { device: None, file: "-x".into() })]
    #[case::detach(&["-d", "a", "b"], LosetupAction::Detach(vec!["a".into(), "b".into()]))]
    #[case::direct_io(&["--direct-io", "a"], LosetupAction::SetDirectIo("a".into(), true))]
    #[case::block_size(&["-b", "4K", "a"], LosetupAction::SetBlockSize("a".into(), 4096))]
    #[case::prefix_of_2_41(&["--re", "-f", "f"], LosetupAction::Create { device: None, file: "f".into() })]
    #[case::remove_shortened(&["--rem", "a"], LosetupAction::Remove(vec!["a".into()]))]
    #[case::remove(&["--remove", "a", "b"], LosetupAction::Remove(vec!["a".into(), "b".into()]))]
    #[case::version(&["-V", "--bogus"], LosetupAction::Version)]
    fn the_arguments_select_the_action(#[case] args: &[&str], #[case] expected: LosetupAction) {
        assert_eq!(parsed(args).unwrap().action, expected);
    }

    #[test]
    fn remove_excludes_other_actions() {
        for args in [&["-d", "a", "--remove"], &["--remove", "-l", "a"]] {
            let options = "--detach-all --all --set-capacity --detach --find --associated --list --remove";
            let expected = LosetupFailure::message(format!("mutually exclusive arguments: {options}"));
            assert_eq!(parsed(args).unwrap_err(), expected);
        }
    }
}
