//! The notes of a release: the changes of its version, and how to install its image.

use testvm::images::oci::index::Contents;

use crate::image::repository;
use crate::sources::VERSION;

/// Returns the section of a changelog for `version`, without its heading, or `None` if there is none or it is empty.
pub(crate) fn section<'a>(changelog: &'a str, version: &str) -> Option<&'a str> {
    let heading = format!("[{version}]");
    let section = changelog.split("\n## ").find(|section| section.starts_with(&heading))?;
    Some(section.split_once('\n')?.1.trim()).filter(|text| !text.is_empty())
}

/// Returns the notes of a release with these changes and this image.
pub(crate) fn notes(changes: &str, contents: &Contents) -> String {
    let repository = repository();
    let platforms: String = contents
        .platforms
        .iter()
        .map(|platform| format!("| linux/{} | `{}` |\n", platform.architecture, platform.digest))
        .collect();
    let index = &contents.digest;
    format!(
        "# loopfs {VERSION}\n\n{changes}\n\n## Image\n\n\
         The archive has one index for all platforms. A registry serves it under the same digest.\n\n\
         | platform | digest |\n|---|---|\n| all | `{index}` |\n{platforms}\n\
         The manifests name the image `{repository}`, which no registry serves. Push the archive to your registry, and have\n\
         kustomize replace the name:\n\n\
         ```yaml\n\
         images:\n  - name: {repository}\n    newName: REGISTRY/loopfs\n    digest: {index}\n\
         ```\n"
    )
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const CHANGELOG: &str = "# Changelog\n\n## [Unreleased]\n\n## [1.1.0] - 2030-01-02\n\n### Added\n\n- A thing.\n\n\
                             ## [1.0.0]\n\n- The first version.\n";

    #[rstest]
    #[case("1.1.0", Some("### Added\n\n- A thing."))]
    #[case("1.0.0", Some("- The first version."))]
    #[case("Unreleased", None)]
    #[case("1.1", None)]
    #[case("2.0.0", None)]
    fn section_ends_at_next_version(#[case] version: &str, #[case] expected: Option<&str>) {
        assert_eq!(section(CHANGELOG, version), expected);
    }
}
