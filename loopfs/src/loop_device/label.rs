//! Labels of loop devices: the field `lo_file_name` of the kernel.

use crate::sys::loop_abi as abi;

/// Returns the whole characters of a label that fit into the kernel's field.
pub(super) fn fitting(label: &str) -> &str {
    // `str::floor_char_boundary` does this since Rust 1.91.
    let end = (0..=label.len().min(abi::LABEL_SIZE)).rev().find(|end| label.is_char_boundary(*end));
    &label[..end.unwrap_or(0)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_is_truncated_between_characters() {
        assert_eq!(fitting("data"), "data");
        let fits = "a".repeat(abi::LABEL_SIZE);
        assert_eq!(fitting(&fits), fits);
        assert_eq!(fitting(&format!("{fits}b")), fits);
        let umlaut = format!("{}ü", &fits[1..]);
        assert_eq!(fitting(&umlaut), &fits[1..]);
    }
}
