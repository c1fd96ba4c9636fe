//! The options of losetup(8), and what this program does for each.

/// Whether an option has a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Value {
    None,
    Required,
    Optional,
}

/// An option of the command line.
#[derive(Debug)]
pub(crate) struct Opt {
    pub(crate) id: Id,
    pub(crate) short: Option<char>,
    pub(crate) long: &'static str,
    pub(crate) value: Value,
    /// The name of the value in the help.
    pub(crate) metavariable: &'static str,
    pub(crate) help: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Id {
    All,
    SetCapacity,
    Detach,
    DetachAll,
    Find,
    NoOverlap,
    Help,
    Associated,
    Json,
    List,
    SectorSize,
    NoHeadings,
    Offset,
    Output,
    OutputAll,
    SizeLimit,
    PartScan,
    ReadOnly,
    DirectIo,
    Raw,
    LoopRef,
    Show,
    Verbose,
    Version,
    Remove,
}

macro_rules! options {
    ($($id:ident $short:tt $long:literal $value:ident $meta:literal $help:literal)*) => {
        &[$(Opt {
            id: Id::$id,
            short: options!(@short $short),
            long: $long,
            value: Value::$value,
            metavariable: $meta,
            help: $help,
        }),*]
    };
    (@short none) => { None };
    (@short $short:literal) => { Some($short) };
}

/// All supported options. The order is that of the possibilities in the message for an ambiguous prefix.
pub(crate) const OPTIONS: &[Opt] = options! {
    All 'a' "all" None "" "list all bound devices"
    SetCapacity 'c' "set-capacity" Required "DEVICE" "set the capacity of a device to the size of its file"
    Detach 'd' "detach" Required "DEVICE..." "detach devices"
    DetachAll 'D' "detach-all" None "" "detach all bound devices of the machine"
    Find 'f' "find" None "" "print the first unbound device, or bind FILE to it"
    NoOverlap 'L' "nooverlap" None "" "bind no device that overlaps another one of the file; use an equal one again"
    Help 'h' "help" None "" "print this help"
    Associated 'j' "associated" Required "FILE" "list the devices of a file (with --offset: those with this offset)"
    Json 'J' "json" None "" "print the list as JSON"
    List 'l' "list" None "" "print a table, of one device or of all"
    SectorSize 'b' "sector-size" Required "SIZE" "logical block size, of a new or of a bound device"
    NoHeadings 'n' "noheadings" None "" "print the table without headings"
    Offset 'o' "offset" Required "SIZE" "begin at this offset of the file"
    Output 'O' "output" Required "COLUMNS" "columns of the table, separated by commas"
    OutputAll none "output-all" None "" "print all columns"
    SizeLimit none "sizelimit" Required "SIZE" "map at most this many bytes of the file"
    PartScan 'P' "partscan" None "" "let the kernel scan the partition table"
    ReadOnly 'r' "read-only" None "" "bind a read-only device"
    DirectIo none "direct-io" Optional "on|off" "bypass the page cache of the file, for a new or a bound device"
    Raw none "raw" None "" "print the table without alignment"
    LoopRef none "loop-ref" Required "STRING" "name that the kernel keeps with the device instead of the path"
    Show none "show" None "" "print the device that was bound"
    Verbose 'v' "verbose" None "" "no effect, as in util-linux"
    Version 'V' "version" None "" "print the version"
    Remove none "remove" None "DEVICE..." "remove unbound devices from the system"
};

#[cfg(test)]
mod tests {
    use super::*;

    const README: &str = include_str!("../../README.md");

    #[test]
    fn the_readme_lists_exactly_the_options() {
        let names = |option: &Opt| {
            let short = option.short.map(|letter| format!("`-{letter}`, "));
            format!("{}`--{}`", short.unwrap_or_default(), option.long)
        };
        let mut expected: Vec<String> = OPTIONS.iter().map(names).collect();
        let section = README.split("## losetup").nth(1).expect("a section about losetup");
        let section = section.split("\n## ").next().unwrap_or_default();
        let mut rows: Vec<String> = section
            .lines()
            .filter(|line| line.starts_with("| `-"))
            .filter_map(|line| line.split('|').nth(1).map(|cell| cell.trim().to_owned()))
            .collect();
        expected.sort();
        rows.sort();
        assert_eq!(rows, expected);
    }

    #[test]
    fn option_names_are_unique() {
        let mut long: Vec<&str> = OPTIONS.iter().map(|option| option.long).collect();
        long.sort_unstable();
        long.dedup();
        assert_eq!(long.len(), OPTIONS.len());
        let mut short: Vec<char> = OPTIONS.iter().filter_map(|option| option.short).collect();
        let count = short.len();
        short.sort_unstable();
        short.dedup();
        assert_eq!(short.len(), count);
    }
}
