//! Spelling of every file of the workspace, by the words of `typos.toml`. The program `typos` reads the same file.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use ignore::WalkBuilder;
use ignore::overrides::OverrideBuilder;
use typos_cli::file::{FileChecker, Typos};
use typos_cli::policy::{ConfigEngine, ConfigStorage};
use typos_cli::report::{Context, Message, Report};

/// Collects one line for each misspelt word.
#[derive(Default)]
struct Findings(Mutex<Vec<String>>);

impl Report for Findings {
    fn report(&self, message: Message<'_>) -> Result<(), std::io::Error> {
        let finding = match message {
            Message::Typo(typo) => {
                let place = match &typo.context {
                    Some(Context::File(file)) => format!("{}:{}", file.path.display(), file.line_num),
                    Some(Context::Path(path)) => path.path.display().to_string(),
                    _ => "?".to_owned(),
                };
                format!("{place}: {}: {:?}", typo.typo, typo.corrections)
            }
            Message::Error(error) => error.msg.clone(),
            _ => return Ok(()),
        };
        self.0.lock().unwrap().push(finding);
        Ok(())
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().canonicalize().unwrap()
}

#[test]
fn misspelt_and_unwanted_words_are_found() {
    let (root, storage, findings) = (root(), ConfigStorage::new(), Findings::default());
    let mut engine = ConfigEngine::new(&storage);
    engine.init_dir(&root).unwrap();
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let source = directory.path().join("source.rs");
    // In two parts each, because this file is checked too.
    std::fs::write(&source, concat!("// Pods rec", "ieve what who", "ever sends.\n")).unwrap();
    Typos.check_file(&source, false, &engine.policy(&root.join("source.rs")), &findings).unwrap();
    assert_eq!(findings.0.into_inner().unwrap().len(), 2);
}

#[test]
fn every_file_passes_spell_check() {
    let (root, storage, findings) = (root(), ConfigStorage::new(), Findings::default());
    let mut engine = ConfigEngine::new(&storage);
    engine.init_dir(&root).unwrap();
    let mut excluded = OverrideBuilder::new(&root);
    for pattern in engine.walk(&root).extend_exclude.iter().map(String::as_str).chain(["/.git"]) {
        excluded.add(&format!("!{pattern}")).unwrap();
    }
    let mut walk = WalkBuilder::new(&root);
    walk.hidden(false).overrides(excluded.build().unwrap());
    assert!(walk.build().count() > 100, "too few files are checked");
    typos_cli::file::walk_path(walk.build(), &Typos, &engine, &findings, false).unwrap();
    let findings = findings.0.into_inner().unwrap();
    assert!(findings.is_empty(), "misspelt, or missing in typos.toml:\n{}", findings.join("\n"));
}
