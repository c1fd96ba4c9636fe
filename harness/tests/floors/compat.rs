//! Names that users, manifests and stored volumes depend on.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use proc_macro2::{Literal, TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Attribute, Expr, Item, Lit, Meta};

use crate::{Crate, compare, crates, imports};

/// The prefix of the extended attributes on the disk.
const ATTRIBUTE: &str = "trusted.loopfs.";

/// The names in a crate's sources outside of tests.
#[derive(Default)]
struct Names {
    texts: BTreeSet<String>,
    flags: BTreeSet<String>,
    /// The constants of parameters of a StorageClass.
    parameters: BTreeSet<String>,
    /// The texts of constants.
    constants: BTreeMap<String, String>,
}

impl Names {
    fn read(directory: &Path, names: &mut Names) {
        let entries =
            fs::read_dir(directory).unwrap_or_else(|error| panic!("read {}: {error}", directory.display()));
        for entry in entries {
            let path = entry.expect("read a directory").path();
            // A module of tests that has a file of its own.
            if path.file_stem().is_some_and(|name| name.to_string_lossy().ends_with("tests")) {
                continue;
            }
            if path.is_dir() {
                Names::read(&path, names);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path)
                    .unwrap_or_else(|error| panic!("read {}: {error}", path.display()));
                let file = syn::parse_file(&text);
                names.visit_file(&file.unwrap_or_else(|error| panic!("parse {}: {error}", path.display())));
            }
        }
    }

    fn literal(&mut self, literal: Lit) {
        let text = match literal {
            Lit::Str(text) => text.value(),
            Lit::ByteStr(text) => String::from_utf8_lossy(&text.value()).into_owned(),
            Lit::CStr(text) => text.value().to_string_lossy().into_owned(),
            _ => return,
        };
        self.texts.insert(without_arguments(text.trim_end()));
    }

    fn literals(&mut self, tokens: TokenStream) {
        for token in tokens {
            match token {
                TokenTree::Group(group) => self.literals(group.stream()),
                TokenTree::Literal(literal) => self.token(literal),
                TokenTree::Ident(_) | TokenTree::Punct(_) => {}
            }
        }
    }

    fn token(&mut self, literal: Literal) {
        self.literal(Lit::new(literal));
    }

    /// Adds a flag of clap: the field's name, or the value of `long = ".."`.
    fn flag(&mut self, field: Option<String>, attribute: &Attribute) {
        if !attribute.path().is_ident("arg") {
            return;
        }
        let Meta::List(list) = &attribute.meta else { return };
        let tokens: Vec<TokenTree> = list.tokens.clone().into_iter().collect();
        let is_long = |token: &TokenTree| matches!(token, TokenTree::Ident(ident) if ident == "long");
        let Some(at) = tokens.iter().position(is_long) else { return };
        let given = match (tokens.get(at + 1), tokens.get(at + 2)) {
            (Some(TokenTree::Punct(_)), Some(TokenTree::Literal(text))) => {
                Some(text.to_string().replace('"', ""))
            }
            _ => None,
        };
        if let Some(name) = given.or_else(|| Some(field?.trim_start_matches("r#").replace('_', "-"))) {
            self.flags.insert(format!("--{name}"));
        }
    }
}

/// Returns the format string with `{}` for each argument, whatever its name in the code.
fn without_arguments(text: &str) -> String {
    let mut pieces = text.split('{');
    let first = pieces.next().unwrap_or_default().to_owned();
    pieces.fold(first, |text, piece| match piece.split_once('}') {
        Some((_, rest)) => format!("{text}{{}}{rest}"),
        None => format!("{text}{{{piece}"),
    })
}

impl<'ast> Visit<'ast> for Names {
    fn visit_item(&mut self, item: &'ast Item) {
        if !imports::is_test(imports::attributes(item)) {
            visit::visit_item(self, item);
        }
    }

    fn visit_lit(&mut self, literal: &'ast Lit) {
        self.literal(literal.clone());
    }

    fn visit_item_const(&mut self, item: &'ast syn::ItemConst) {
        if let Expr::Lit(syn::ExprLit { lit: Lit::Str(text), .. }) = &*item.expr {
            let name = item.ident.to_string();
            // Those of loopfs are in a table of `Setting`.
            if name.ends_with("PARAMETER") {
                self.parameters.insert(name.clone());
            }
            self.constants.insert(name, text.value());
        }
        visit::visit_item_const(self, item);
    }

    fn visit_expr_struct(&mut self, value: &'ast syn::ExprStruct) {
        if value.path.is_ident("Setting")
            && let Some(Expr::Path(name)) = value.fields.first().map(|field| &field.expr)
            && let Some(name) = name.path.get_ident()
        {
            self.parameters.insert(name.to_string());
        }
        visit::visit_expr_struct(self, value);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        self.literals(call.tokens.clone());
    }

    fn visit_attribute(&mut self, attribute: &'ast Attribute) {
        if attribute.path().is_ident("arg")
            && let Meta::List(list) = &attribute.meta
        {
            self.literals(list.tokens.clone());
        }
    }

    fn visit_field(&mut self, field: &'ast syn::Field) {
        for attribute in &field.attrs {
            self.flag(field.ident.as_ref().map(ToString::to_string), attribute);
        }
        visit::visit_field(self, field);
    }
}

#[test]
fn format_arguments_lose_their_names() {
    assert_eq!(without_arguments("topology.{driver}/node{:?}"), "topology.{}/node{}");
    assert_eq!(without_arguments("{ open"), "{ open");
}

/// Returns lines `CRATE KIND NAME` for every name whose kind the code shows, and all other literals. A `text`
/// is a literal that the list includes by choice: names of files, annotations, labels, finalizers.
fn found(member: &Crate) -> (BTreeSet<String>, BTreeSet<String>) {
    let mut names = Names::default();
    Names::read(&member.directory.join("src"), &mut names);
    let name = &member.name;
    let attributes =
        names.texts.iter().filter(|text| text.strip_prefix(ATTRIBUTE).is_some_and(|rest| !rest.is_empty()));
    let found = attributes.map(|text| format!("{name} attribute {text}"));
    let found = found.chain(names.flags.iter().map(|flag| format!("{name} flag {flag}")));
    let parameters = names.parameters.iter().map(|parameter| &names.constants[parameter]);
    let found = found.chain(parameters.map(|parameter| format!("{name} parameter {parameter}")));
    let texts = names.texts.iter().map(|text| format!("{name} text {text}")).collect();
    (found.collect(), texts)
}

/// Scripts, dashboards, manifests and stored volumes depend on these names.
#[test]
fn public_names_are_unchanged() {
    let (mut wanted, mut texts) = (BTreeSet::new(), BTreeSet::new());
    for member in crates() {
        let (found, said) = found(&member);
        wanted.extend(found);
        texts.extend(said);
    }
    compare(
        "compat.txt",
        &wanted,
        |line| texts.contains(line),
        "a line to remove is a name that scripts, dashboards, manifests or stored volumes use and the sources have no longer: keep \
         the name, or write the change into CHANGELOG.md first; a line to add is a new name, which has to stay from now on",
    );
}
