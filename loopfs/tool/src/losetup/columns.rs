//! The lists of losetup(8), as libsmartcols prints them when standard output is not a terminal.

use std::os::unix::ffi::OsStrExt;

use loopfs::DeviceNumber;
use loopfs::loop_device::BackingFile;
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
enum ColumnKind {
    Text,
    Number,
    Boolean,
}

use ColumnKind::{Boolean, Number, Text};

/// A column of a list.
#[derive(Debug)]
pub(crate) struct Column {
    pub(crate) title: &'static str,
    kind: ColumnKind,
    pub(crate) help: &'static str,
    /// Returns the content for a device, or `None` if it has none. `true`: device numbers are padded.
    cell: fn(&Row, bool) -> Option<Vec<u8>>,
}

/// All columns, in the order of `--output-all`.
pub(crate) static COLUMNS: [Column; 17] = [
    column("NAME", Text, "path of the device", |row, _| Some(row.shown_name().into_bytes())),
    column("AUTOCLEAR", Boolean, "the kernel detaches the device at its last close", |row, _| {
        flag(row.attributes.auto_clear)
    }),
    column("BACK-FILE", Text, "path of the file", |row, _| {
        row.attributes.backing_path.as_ref().map(|path| path.as_os_str().as_bytes().to_vec())
    }),
    column("BACK-INO", Number, "inode number of the file", |row, _| number(row.backing(|file| file.inode))),
    column("BACK-MAJ:MIN", Text, "device number of the file's file system", |row, padded| {
        device_number(row.backing(|file| file.device), padded, 8)
    }),
    column("BACK-MAJ", Text, "major part of that number", |row, _| {
        number(row.backing(|file| file.device.major))
    }),
    column("BACK-MIN", Text, "minor part of that number", |row, _| {
        number(row.backing(|file| file.device.minor))
    }),
    column("MAJ:MIN", Text, "device number of the loop device", |row, padded| {
        device_number(row.number, padded, 3)
    }),
    column("MAJ", Number, "major part of that number", |row, _| {
        number(row.number.map(|number| number.major))
    }),
    column("MIN", Number, "minor part of that number", |row, _| {
        number(row.number.map(|number| number.minor))
    }),
    column("OFFSET", Number, "where the device begins in the file, in bytes", |row, _| {
        number(row.attributes.offset)
    }),
    column("PARTSCAN", Boolean, "the kernel scans the partition table", |row, _| {
        flag(row.attributes.partition_scan)
    }),
    column("REF", Text, "name that the kernel keeps with the device", |row, _| {
        row.attributes.name.as_ref().map(|name| name.as_bytes().to_vec())
    }),
    column("RO", Boolean, "the device refuses writes", |row, _| flag(row.attributes.read_only)),
    column("SIZELIMIT", Number, "size limit in bytes, 0 for none", |row, _| {
        number(row.attributes.size_limit)
    }),
    column("DIO", Boolean, "I/O bypasses the page cache of the file", |row, _| {
        flag(row.attributes.direct_io)
    }),
    column("LOG-SEC", Number, "logical block size in bytes", |row, _| number(row.attributes.block_size)),
];

const fn column(
    title: &'static str,
    kind: ColumnKind,
    help: &'static str,
    cell: fn(&Row, bool) -> Option<Vec<u8>>,
) -> Column {
    Column { title, kind, help, cell }
}

fn flag(value: bool) -> Option<Vec<u8>> {
    Some(if value { b"1" } else { b"0" }.to_vec())
}

fn number(value: Option<impl ToString>) -> Option<Vec<u8>> {
    value.map(|value| value.to_string().into_bytes())
}

fn device_number(number: Option<DeviceNumber>, padded: bool, width: usize) -> Option<Vec<u8>> {
    let text = number.map(|number| match padded {
        true => format!("{:>width$}:{:<3}", number.major, number.minor),
        false => number.to_string(),
    });
    text.map(String::into_bytes)
}

impl Column {
    /// Returns the column with a title in upper or lower case.
    pub(crate) fn titled(title: &str) -> Option<&'static Self> {
        COLUMNS.iter().find(|column| column.title.eq_ignore_ascii_case(title))
    }

    /// Numbers and flags are aligned to the right.
    fn is_right(&self) -> bool {
        self.kind != Text
    }

    fn cell(&self, row: &Row, format: ListFormat) -> Option<Vec<u8>> {
        (self.cell)(row, !format.raw && !format.json)
    }
}

impl Row {
    fn backing<T>(&self, part: fn(BackingFile) -> T) -> Option<T> {
        self.attributes.backing.map(part)
    }

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
pub(crate) fn list(rows: &[Row], columns: &[&Column], format: ListFormat, utf8: bool) -> Vec<u8> {
    if format.json {
        return json(rows, columns, format);
    }
    let lines: Vec<Vec<Vec<u8>>> = rows
        .iter()
        .map(|row| {
            let cell = |column: &&Column| column.cell(row, format).unwrap_or_default();
            let escape =
                |cell: Vec<u8>| if format.raw { escape_raw(&cell) } else { escape_table(&cell, utf8) };
            columns.iter().map(cell).map(escape).collect()
        })
        .collect();
    if lines.is_empty() {
        return Vec::new();
    }
    let titles: Vec<Vec<u8>> = columns.iter().map(|column| column.title.as_bytes().to_vec()).collect();
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

fn aligned(line: &[Vec<u8>], columns: &[&Column], widths: &[usize]) -> Vec<u8> {
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

fn json(rows: &[Row], columns: &[&Column], format: ListFormat) -> Vec<u8> {
    let object = |row: &Row| {
        let members = columns.iter().map(|column| {
            let mut member = format!("         \"{}\": ", column.title.to_ascii_lowercase()).into_bytes();
            let value = column.cell(row, format);
            match (value, column.kind) {
                (None, _) => member.extend(b"null"),
                (Some(value), Text) => {
                    let text = String::from_utf8_lossy(&value);
                    member.extend(serde_json::Value::from(text).to_string().into_bytes());
                }
                (Some(value), Number) => member.extend(value),
                (Some(value), Boolean) => {
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

#[cfg(test)]
mod tests {
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

    const TITLES: [&str; 4] = ["NAME", "SIZELIMIT", "BACK-FILE", "LOG-SEC"];

    fn printed(titles: &[&str], format: ListFormat, utf8: bool) -> String {
        let columns: Vec<_> = titles.iter().filter_map(|title| Column::titled(title)).collect();
        String::from_utf8(list(&rows(), &columns, format, utf8)).unwrap()
    }

    #[test]
    fn a_table_is_aligned() {
        assert_eq!(
            printed(&TITLES, ListFormat::default(), true),
            "NAME               SIZELIMIT BACK-FILE    LOG-SEC\n\
             /dev/loop1              8192 /srv/x ü.img     512\n\
             /dev/loop12 (lost)                        \n"
        );
        let format = ListFormat { no_headings: true, ..ListFormat::default() };
        assert_eq!(printed(&["RO", "BACK-FILE"], format, false), "1 /srv/x \\xc3\\xbc.img\n0 \n");
    }

    #[test]
    fn a_raw_list_escapes_blanks() {
        let format = ListFormat { raw: true, ..ListFormat::default() };
        assert_eq!(
            printed(&TITLES, format, true),
            "NAME SIZELIMIT BACK-FILE LOG-SEC\n\
             /dev/loop1 8192 /srv/x\\x20\\xc3\\xbc.img 512\n\
             /dev/loop12\\x20(lost)   \n"
        );
    }
}
