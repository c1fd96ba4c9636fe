//! The lists of losetup(8), as libsmartcols prints them when standard output is not a terminal.

use std::os::unix::ffi::OsStrExt;

use loopfs::DeviceNumber;
use loopfs::loop_device::unmanaged::Attributes;

/// How a list is printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ListFormat {
    pub(crate) no_headings: bool,
    pub(crate) raw: bool,
    pub(crate) json: bool,
}

/// A device in a list.
#[derive(Clone, Debug, Default)]
pub(crate) struct Row {
    /// The path of the node.
    pub(crate) name: String,
    pub(crate) number: Option<DeviceNumber>,
    /// The node does not exist.
    pub(crate) lost: bool,
    pub(crate) attributes: Attributes,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Column {
    Name,
    AutoClear,
    BackingFile,
    BackingInode,
    BackingNumber,
    BackingMajor,
    BackingMinor,
    Number,
    Major,
    Minor,
    Offset,
    PartScan,
    Ref,
    ReadOnly,
    SizeLimit,
    DirectIo,
    BlockSize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ColumnKind {
    Text,
    Number,
    Boolean,
}

impl Column {
    /// All columns, in the order of `--output-all`.
    pub(crate) const ALL: [Self; 17] = [
        Self::Name,
        Self::AutoClear,
        Self::BackingFile,
        Self::BackingInode,
        Self::BackingNumber,
        Self::BackingMajor,
        Self::BackingMinor,
        Self::Number,
        Self::Major,
        Self::Minor,
        Self::Offset,
        Self::PartScan,
        Self::Ref,
        Self::ReadOnly,
        Self::SizeLimit,
        Self::DirectIo,
        Self::BlockSize,
    ];

    pub(crate) fn title(self) -> &'static str {
        self.describe().0
    }

    pub(crate) fn help(self) -> &'static str {
        self.describe().2
    }

    fn describe(self) -> (&'static str, ColumnKind, &'static str) {
        match self {
            Self::Name => ("NAME", ColumnKind::Text, "path of the device"),
            Self::AutoClear => {
                ("AUTOCLEAR", ColumnKind::Boolean, "the kernel detaches the device at its last close")
            }
            Self::BackingFile => ("BACK-FILE", ColumnKind::Text, "path of the file"),
            Self::BackingInode => ("BACK-INO", ColumnKind::Number, "inode number of the file"),
            Self::BackingNumber => {
                ("BACK-MAJ:MIN", ColumnKind::Text, "device number of the file's file system")
            }
            Self::BackingMajor => ("BACK-MAJ", ColumnKind::Text, "major part of that number"),
            Self::BackingMinor => ("BACK-MIN", ColumnKind::Text, "minor part of that number"),
            Self::Number => ("MAJ:MIN", ColumnKind::Text, "device number of the loop device"),
            Self::Major => ("MAJ", ColumnKind::Number, "major part of that number"),
            Self::Minor => ("MIN", ColumnKind::Number, "minor part of that number"),
            Self::Offset => ("OFFSET", ColumnKind::Number, "where the device begins in the file, in bytes"),
            Self::PartScan => ("PARTSCAN", ColumnKind::Boolean, "the kernel scans the partition table"),
            Self::Ref => ("REF", ColumnKind::Text, "name that the kernel keeps with the device"),
            Self::ReadOnly => ("RO", ColumnKind::Boolean, "the device refuses writes"),
            Self::SizeLimit => ("SIZELIMIT", ColumnKind::Number, "size limit in bytes, 0 for none"),
            Self::DirectIo => ("DIO", ColumnKind::Boolean, "I/O bypasses the page cache of the file"),
            Self::BlockSize => ("LOG-SEC", ColumnKind::Number, "logical block size in bytes"),
        }
    }

    /// Numbers and flags are aligned to the right.
    fn is_right(self) -> bool {
        self.describe().1 != ColumnKind::Text
    }

    fn cell(self, row: &Row, format: ListFormat) -> Option<Vec<u8>> {
        let Attributes { backing, .. } = row.attributes;
        let of = &row.attributes;
        let flag = |value: bool| Some(if value { "1" } else { "0" }.to_owned());
        let text = match self {
            Self::Name => Some(row.shown_name()),
            Self::BackingFile => {
                return of.backing_path.as_ref().map(|path| path.as_os_str().as_bytes().to_vec());
            }
            Self::Ref => return of.name.as_ref().map(|name| name.as_bytes().to_vec()),
            Self::AutoClear => flag(of.auto_clear),
            Self::PartScan => flag(of.partition_scan),
            Self::ReadOnly => flag(of.read_only),
            Self::DirectIo => flag(of.direct_io),
            Self::BackingInode => backing.map(|file| file.inode.to_string()),
            Self::BackingNumber => backing.map(|file| match format.raw || format.json {
                true => file.device.to_string(),
                false => format!("{:>8}:{:<3}", file.device.major, file.device.minor),
            }),
            Self::BackingMajor => backing.map(|file| file.device.major.to_string()),
            Self::BackingMinor => backing.map(|file| file.device.minor.to_string()),
            Self::Number => row.number.map(|number| match format.raw || format.json {
                true => number.to_string(),
                false => format!("{:>3}:{:<3}", number.major, number.minor),
            }),
            Self::Major => row.number.map(|number| number.major.to_string()),
            Self::Minor => row.number.map(|number| number.minor.to_string()),
            Self::Offset => of.offset.map(|bytes| bytes.to_string()),
            Self::SizeLimit => of.size_limit.map(|bytes| bytes.to_string()),
            Self::BlockSize => of.block_size.map(|bytes| bytes.to_string()),
        };
        text.map(String::into_bytes)
    }
}

impl Row {
    fn shown_name(&self) -> String {
        format!("{}{}", self.name, if self.lost { " (lost)" } else { "" })
    }

    /// Returns the line of the format without columns. Returns `None` if the device is bound to no file.
    pub(crate) fn line(&self) -> Option<Vec<u8>> {
        let path = self.attributes.backing_path.as_ref()?;
        let identity = match self.attributes.backing {
            Some(file) => format!("[{:04}]:{}", file.device.to_raw(), file.inode),
            None => "[]:".to_owned(),
        };
        let mut line = format!("{}: {identity} (", self.shown_name()).into_bytes();
        line.extend_from_slice(path.as_os_str().as_bytes());
        line.push(b')');
        let parts = [("offset", self.attributes.offset), ("sizelimit", self.attributes.size_limit)];
        for (name, bytes) in parts {
            if let Some(bytes) = bytes.filter(|bytes| *bytes != 0) {
                line.extend(format!(", {name} {bytes}").into_bytes());
            }
        }
        line.push(b'\n');
        Some(line)
    }
}

/// Returns the list in the requested format. `utf8`: the locale has UTF-8, so that characters beyond ASCII are printed.
pub(crate) fn list(rows: &[Row], columns: &[Column], format: ListFormat, utf8: bool) -> Vec<u8> {
    if format.json {
        return json(rows, columns, format);
    }
    let lines: Vec<Vec<Vec<u8>>> = rows
        .iter()
        .map(|row| {
            let cell = |column: &Column| column.cell(row, format).unwrap_or_default();
            let escape =
                |cell: Vec<u8>| if format.raw { escape_raw(&cell) } else { escape_table(&cell, utf8) };
            columns.iter().map(cell).map(escape).collect()
        })
        .collect();
    if lines.is_empty() {
        return Vec::new();
    }
    let titles: Vec<Vec<u8>> = columns.iter().map(|column| column.title().as_bytes().to_vec()).collect();
    let headings = (!format.no_headings).then_some(&titles);
    let printed = headings.into_iter().chain(&lines);
    if format.raw {
        return printed.flat_map(|line| [line.join(&b' '), b"\n".to_vec()].concat()).collect();
    }
    let width = |column: usize| {
        headings.into_iter().chain(&lines).map(|line| width_of(&line[column])).max().unwrap_or_default()
    };
    let widths: Vec<usize> = (0..columns.len()).map(width).collect();
    printed.flat_map(|line| aligned(line, columns, &widths)).collect()
}

fn aligned(line: &[Vec<u8>], columns: &[Column], widths: &[usize]) -> Vec<u8> {
    let mut text = Vec::new();
    for (number, cell) in line.iter().enumerate() {
        let last = number + 1 == line.len();
        let padding = vec![b' '; widths[number] - width_of(cell)];
        match columns[number].is_right() {
            // An empty cell at the end of a line is not padded.
            true if last && cell.is_empty() => {}
            true => text.extend([&padding[..], cell].concat()),
            false if last => text.extend_from_slice(cell),
            false => text.extend([cell, &padding[..]].concat()),
        }
        text.push(if last { b'\n' } else { b' ' });
    }
    text
}

fn width_of(cell: &[u8]) -> usize {
    String::from_utf8_lossy(cell).chars().count()
}

fn hexadecimal(byte: u8) -> Vec<u8> {
    format!("\\x{byte:02x}").into_bytes()
}

fn escape_raw(cell: &[u8]) -> Vec<u8> {
    let escape =
        |byte: &u8| if byte.is_ascii_graphic() && *byte != b'\\' { vec![*byte] } else { hexadecimal(*byte) };
    cell.iter().flat_map(escape).collect()
}

fn escape_table(cell: &[u8], utf8: bool) -> Vec<u8> {
    let mut escaped = Vec::new();
    for chunk in cell.utf8_chunks() {
        for character in chunk.valid().chars() {
            let mut buffer = [0; 4];
            let bytes = character.encode_utf8(&mut buffer).as_bytes();
            let printed = !character.is_control() && (character.is_ascii() || utf8);
            match printed {
                true => escaped.extend_from_slice(bytes),
                false => escaped.extend(bytes.iter().flat_map(|byte| hexadecimal(*byte))),
            }
        }
        escaped.extend(chunk.invalid().iter().flat_map(|byte| hexadecimal(*byte)));
    }
    escaped
}

fn json(rows: &[Row], columns: &[Column], format: ListFormat) -> Vec<u8> {
    let object = |row: &Row| {
        let members = columns.iter().map(|column| {
            let mut member = format!("         \"{}\": ", column.title().to_ascii_lowercase()).into_bytes();
            let value = column.cell(row, format);
            match (value, column.describe().1) {
                (None, _) => member.extend(b"null"),
                (Some(value), ColumnKind::Text) => member.extend(quoted(&value)),
                (Some(value), ColumnKind::Number) => member.extend(value),
                (Some(value), ColumnKind::Boolean) => {
                    member.extend(if value == b"1" { &b"true"[..] } else { b"false" });
                }
            }
            member
        });
        [&b"{\n"[..], &members.collect::<Vec<_>>().join(&b",\n"[..]), b"\n      }"].concat()
    };
    let objects = rows.iter().map(object).collect::<Vec<_>>().join(&b","[..]);
    let indent: &[u8] = if rows.is_empty() { b"" } else { b"      " };
    [b"{\n   \"loopdevices\": [\n", indent, &objects, b"\n   ]\n}\n"].concat()
}

fn quoted(text: &[u8]) -> Vec<u8> {
    let mut quoted = vec![b'"'];
    for byte in text {
        match byte {
            b'"' | b'\\' => quoted.extend([b'\\', *byte]),
            b'\n' => quoted.extend(b"\\n"),
            b'\r' => quoted.extend(b"\\r"),
            b'\t' => quoted.extend(b"\\t"),
            0x08 => quoted.extend(b"\\b"),
            0x0c => quoted.extend(b"\\f"),
            0..0x20 => quoted.extend(format!("\\u{byte:04x}").into_bytes()),
            _ => quoted.push(*byte),
        }
    }
    quoted.push(b'"');
    quoted
}

#[cfg(test)]
mod tests {
    use loopfs::loop_device::BackingFile;

    use super::*;

    fn rows() -> [Row; 2] {
        let number = |minor| Some(DeviceNumber { major: 7, minor });
        let backing = BackingFile { device: DeviceNumber { major: 254, minor: 0 }, inode: 131 };
        let bound = Attributes {
            backing_path: Some("/srv/x ü.img".into()),
            backing: Some(backing),
            offset: Some(4096),
            size_limit: Some(8192),
            block_size: Some(512),
            read_only: true,
            ..Attributes::default()
        };
        [
            Row { name: "/dev/loop1".to_owned(), number: number(1), lost: false, attributes: bound },
            Row { name: "/dev/loop12".to_owned(), number: number(12), lost: true, ..Row::default() },
        ]
    }

    const COLUMNS: [Column; 4] = [Column::Name, Column::SizeLimit, Column::BackingFile, Column::BlockSize];

    fn printed(columns: &[Column], format: ListFormat, utf8: bool) -> String {
        String::from_utf8(list(&rows(), columns, format, utf8)).unwrap()
    }

    #[test]
    fn a_table_is_aligned() {
        assert_eq!(
            printed(&COLUMNS, ListFormat::default(), true),
            "NAME               SIZELIMIT BACK-FILE    LOG-SEC\n\
             /dev/loop1              8192 /srv/x ü.img     512\n\
             /dev/loop12 (lost)                        \n"
        );
        let format = ListFormat { no_headings: true, ..ListFormat::default() };
        assert_eq!(
            printed(&[Column::ReadOnly, Column::BackingFile], format, false),
            "1 /srv/x \\xc3\\xbc.img\n0 \n"
        );
    }

    #[test]
    fn a_raw_list_escapes_blanks() {
        let format = ListFormat { raw: true, ..ListFormat::default() };
        assert_eq!(
            printed(&COLUMNS, format, true),
            "NAME SIZELIMIT BACK-FILE LOG-SEC\n\
             /dev/loop1 8192 /srv/x\\x20\\xc3\\xbc.img 512\n\
             /dev/loop12\\x20(lost)   \n"
        );
    }

    #[test]
    fn a_json_list_has_typed_values() {
        let format = ListFormat { json: true, ..ListFormat::default() };
        let text = printed(&Column::ALL, format, true);
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        let first = &value["loopdevices"][0];
        assert_eq!(first["sizelimit"], 8192);
        assert_eq!(first["ro"], true);
        assert_eq!(first["back-maj:min"], "254:0");
        assert_eq!(value["loopdevices"][1]["back-file"], serde_json::Value::Null);
        assert!(text.starts_with("{\n   \"loopdevices\": [\n      {\n         \"name\": \"/dev/loop1\",\n"));
        assert!(text.ends_with("\n      }\n   ]\n}\n"));
        assert_eq!(list(&[], &COLUMNS, format, true), b"{\n   \"loopdevices\": [\n\n   ]\n}\n");
        assert_eq!(list(&[], &COLUMNS, ListFormat::default(), true), b"");
    }

    #[test]
    fn a_line_has_file_and_range() {
        let [bound, unbound] = rows();
        let line = String::from_utf8(bound.line().unwrap()).unwrap();
        assert_eq!(line, "/dev/loop1: [65024]:131 (/srv/x ü.img), offset 4096, sizelimit 8192\n");
        assert_eq!(unbound.line(), None);
    }

    #[test]
    fn text_in_json_is_quoted() {
        assert_eq!(quoted(b"a\"\\\n\x01\xc3\xbc"), b"\"a\\\"\\\\\\n\\u0001\xc3\xbc\"");
    }
}
