//! Reads the sources of a crate: the imports between its files, and the names in them.
//!
//! The graph is read without expanding macros: `use` lines, paths in code, and paths in the tokens of macro calls and attributes. A name
//! is followed through re-exports and private imports to the file that defines it, so an edge never ends at a `mod.rs` that only
//! re-exports. Method calls are not considered, but the type's path is.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use proc_macro2::{Ident, TokenStream, TokenTree};
use syn::punctuated::Punctuated;
use syn::visit::{self, Visit};
use syn::{Attribute, Expr, ExprLit, Item, Lit, Meta, Token, UseTree};

/// The files of one crate and their imports of each other. A file is named by its path below `src`, without `.rs`, and without
/// `mod` or a program's `main` at the end: `cluster/node`, `cluster`, `bin/dbg`.
pub(crate) type Imports = BTreeMap<String, BTreeSet<String>>;

/// The library and the programs of a crate. Tests are omitted: modules and items under `cfg(test)`, and everything outside `src`. So are the
/// imports of a program from the library, which cannot import from it.
pub(crate) struct Sources {
    directory: PathBuf,
    modules: Vec<Module>,
}

#[derive(Default)]
struct Module {
    file: String,
    parent: Option<usize>,
    children: BTreeMap<String, usize>,
    /// The names that the module defines.
    items: BTreeSet<String>,
    /// The names that it imports or re-exports, with their paths.
    imports: Vec<(String, Vec<String>)>,
    /// The modules and types of its glob imports.
    globs: Vec<Vec<String>>,
    /// The paths in its code.
    references: Vec<Vec<String>>,
    /// The literals in its code, with `{}` for each argument of a format string.
    texts: BTreeSet<String>,
    /// The flags of its command lines.
    flags: BTreeSet<String>,
}

/// A module, or an item in a module.
#[derive(Clone, Copy)]
enum Target {
    Module(usize),
    Item(usize),
}

impl Sources {
    pub(crate) fn read(directory: &Path) -> Sources {
        let directory = directory.join("src");
        let mut roots = vec![directory.join("lib.rs"), directory.join("main.rs")];
        for program in fs::read_dir(directory.join("bin")).into_iter().flatten() {
            let path = program.expect("read src/bin").path();
            roots.extend([path.join("main.rs"), path]);
        }
        let mut sources = Sources { directory, modules: Vec::new() };
        for root in roots.iter().filter(|root| root.is_file()) {
            sources.load_file(root, root.parent().expect("a source file has a directory"), None);
        }
        sources
    }

    /// Loads a file and the modules that it declares, whose files are in `directory`.
    fn load_file(&mut self, path: &Path, directory: &Path, parent: Option<usize>) -> usize {
        let parsed =
            syn::parse_file(&read(path)).unwrap_or_else(|error| panic!("parse {}: {error}", path.display()));
        let below = path.strip_prefix(&self.directory).expect("it is below src").with_extension("");
        let is_face = ["mod", "main"].iter().any(|name| below.ends_with(name));
        let file = below.parent().filter(|above| is_face && **above != *"").unwrap_or(&below);
        self.load_items(&file.to_string_lossy(), &parsed.items, directory, parent)
    }

    fn load_items(&mut self, file: &str, items: &[Item], directory: &Path, parent: Option<usize>) -> usize {
        let index = self.modules.len();
        self.modules.push(Module { file: file.to_owned(), parent, ..Module::default() });
        for item in items {
            let (attributes, defined) = header(item);
            if is_test(attributes) {
                continue;
            }
            if let Item::Mod(child) = item {
                let name = child.ident.to_string();
                let below = directory.join(&name);
                let child = match &child.content {
                    Some((_, items)) => self.load_items(file, items, &below, Some(index)),
                    None => {
                        let path = directory.join(format!("{name}.rs"));
                        let path = if path.is_file() { path } else { below.join("mod.rs") };
                        self.load_file(&path, &below, Some(index))
                    }
                };
                self.modules[index].children.insert(name, child);
                continue;
            }
            let module = &mut self.modules[index];
            module.items.extend(defined.map(Ident::to_string));
            if let Item::Use(import) = item {
                flatten(&import.tree, &mut Vec::new(), &mut |path, name| match name {
                    Some(name) => module.imports.push((name, path)),
                    None => module.globs.push(path),
                });
            }
            module.visit_item(item);
        }
        index
    }

    pub(crate) fn imports(&self) -> Imports {
        let mut imports = Imports::new();
        for (index, module) in self.modules.iter().enumerate() {
            let targets = module.references.iter().filter_map(|path| {
                match self.resolve(index, path, &mut BTreeSet::new())? {
                    Target::Item(at) => Some(self.modules[at].file.clone()),
                    Target::Module(_) => None,
                }
            });
            let others = targets.filter(|file| *file != module.file);
            imports.entry(module.file.clone()).or_default().extend(others);
        }
        imports
    }

    pub(crate) fn texts(&self) -> impl Iterator<Item = &String> {
        self.modules.iter().flat_map(|module| &module.texts)
    }

    pub(crate) fn flags(&self) -> impl Iterator<Item = &String> {
        self.modules.iter().flat_map(|module| &module.flags)
    }

    fn root(&self, module: usize) -> usize {
        self.modules[module].parent.map_or(module, |parent| self.root(parent))
    }

    /// Follows a path from a module. Returns `None` if it leads out of the crate.
    fn resolve(&self, from: usize, path: &[String], seen: &mut BTreeSet<(usize, String)>) -> Option<Target> {
        let mut target = Target::Module(from);
        for (position, name) in path.iter().enumerate() {
            let Target::Module(at) = target else { break };
            target = match name.as_str() {
                "crate" => Target::Module(self.root(at)),
                "self" => Target::Module(at),
                "super" => Target::Module(self.modules[at].parent?),
                _ => match self.lookup(at, name, position + 1 == path.len(), seen) {
                    Some(target) => target,
                    None if position == 0 => return None,
                    // The name comes from a macro, or from another crate that the module re-exports.
                    None => Target::Item(at),
                },
            };
        }
        Some(target)
    }

    fn lookup(
        &self,
        at: usize,
        name: &str,
        last: bool,
        seen: &mut BTreeSet<(usize, String)>,
    ) -> Option<Target> {
        let module = &self.modules[at];
        let item = module.items.contains(name).then_some(Target::Item(at));
        let child = module.children.get(name).map(|child| Target::Module(*child));
        let mut targets: Vec<Target> = item.into_iter().chain(child).collect();
        if targets.is_empty() {
            if !seen.insert((at, name.to_owned())) {
                return None;
            }
            let imports = module.imports.iter().filter(|(import, _)| import == name);
            targets.extend(imports.filter_map(|(_, path)| self.resolve(at, path, seen)));
        }
        // A module and a function can have the same name. The last segment refers to the item.
        targets.sort_by_key(|target| matches!(target, Target::Module(_)) == last);
        targets.first().copied().or_else(|| {
            module.globs.iter().find_map(|path| match self.resolve(at, path, seen)? {
                Target::Module(other) => self.lookup(other, name, last, seen),
                Target::Item(_) => None,
            })
        })
    }
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("read {}: {error}", path.display()))
}

/// Returns `true` if the item exists only in tests.
fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().filter(|attribute| attribute.path().is_ident("cfg")).any(|attribute| {
        let condition = attribute.meta.require_list().expect("cfg has a condition").tokens.to_string();
        condition == "test" || condition.replace(' ', "").starts_with("all(test,")
    })
}

/// Returns the attributes of an item, and the name that it defines beside modules.
fn header(item: &Item) -> (&[Attribute], Option<&Ident>) {
    match item {
        Item::Const(item) => (&item.attrs, Some(&item.ident)),
        Item::Enum(item) => (&item.attrs, Some(&item.ident)),
        Item::Fn(item) => (&item.attrs, Some(&item.sig.ident)),
        Item::Impl(item) => (&item.attrs, None),
        Item::Macro(item) => (&item.attrs, item.ident.as_ref()),
        Item::Mod(item) => (&item.attrs, None),
        Item::Static(item) => (&item.attrs, Some(&item.ident)),
        Item::Struct(item) => (&item.attrs, Some(&item.ident)),
        Item::Trait(item) => (&item.attrs, Some(&item.ident)),
        Item::Type(item) => (&item.attrs, Some(&item.ident)),
        Item::Union(item) => (&item.attrs, Some(&item.ident)),
        Item::Use(item) => (&item.attrs, None),
        _ => (&[], None),
    }
}

/// Calls `each` with the path and the local name of each import; a glob has no name.
fn flatten(tree: &UseTree, above: &mut Vec<String>, each: &mut impl FnMut(Vec<String>, Option<String>)) {
    let mut import = |name: &Ident, local: &Ident| {
        let last = (name != "self").then(|| name.to_string());
        let path: Vec<String> = above.iter().cloned().chain(last).collect();
        let local = if local == "self" { path.last().cloned() } else { Some(local.to_string()) };
        each(path, local);
    };
    match tree {
        UseTree::Path(path) => {
            above.push(path.ident.to_string());
            flatten(&path.tree, above, each);
            above.pop();
        }
        UseTree::Name(name) => import(&name.ident, &name.ident),
        UseTree::Rename(rename) => import(&rename.ident, &rename.rename),
        UseTree::Glob(_) => each(above.clone(), None),
        UseTree::Group(group) => group.items.iter().for_each(|tree| flatten(tree, above, each)),
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

impl Module {
    /// Adds the literals and paths among unparsed tokens: `a :: b :: c`.
    fn visit_tokens(&mut self, tokens: TokenStream) {
        let mut path = Vec::new();
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Punct(punct) if punct.as_char() == ':' => {
                    colons += 1;
                    continue;
                }
                TokenTree::Ident(ident) if colons == 2 => path.push(ident.to_string()),
                TokenTree::Ident(ident) => self.refer(std::mem::replace(&mut path, vec![ident.to_string()])),
                TokenTree::Group(group) => {
                    self.refer(std::mem::take(&mut path));
                    self.visit_tokens(group.stream());
                }
                TokenTree::Literal(literal) => {
                    self.refer(std::mem::take(&mut path));
                    self.visit_lit(&Lit::new(literal));
                }
                TokenTree::Punct(_) => self.refer(std::mem::take(&mut path)),
            }
            colons = 0;
        }
        self.refer(path);
    }

    /// Adds a path. A single name is defined here or imported by a `use`, so it is omitted.
    fn refer(&mut self, path: Vec<String>) {
        if path.len() > 1 {
            self.references.push(path);
        }
    }
}

impl<'ast> Visit<'ast> for Module {
    fn visit_item(&mut self, item: &'ast Item) {
        if !is_test(header(item).0) {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if !is_test(&item.attrs) {
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_item_use(&mut self, import: &'ast syn::ItemUse) {
        flatten(&import.tree, &mut Vec::new(), &mut |path, _| self.references.push(path));
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.leading_colon.is_none() {
            self.refer(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        self.visit_tokens(call.tokens.clone());
    }

    fn visit_attribute(&mut self, attribute: &'ast Attribute) {
        if let Meta::List(list) = &attribute.meta {
            self.visit_tokens(list.tokens.clone());
        }
    }

    // `pub(in crate::x)` imports nothing.
    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {}

    fn visit_lit(&mut self, literal: &'ast Lit) {
        let text = match literal {
            Lit::Str(text) => text.value(),
            Lit::ByteStr(text) => String::from_utf8_lossy(&text.value()).into_owned(),
            Lit::CStr(text) => text.value().to_string_lossy().into_owned(),
            _ => return,
        };
        self.texts.insert(without_arguments(text.trim_end()));
    }

    /// Adds a flag of clap: the field's name, or the value of `long = ".."`.
    fn visit_field(&mut self, field: &'ast syn::Field) {
        let is_long = |path: &Expr| matches!(path, Expr::Path(path) if path.path.is_ident("long"));
        for attribute in field.attrs.iter().filter(|attribute| attribute.path().is_ident("arg")) {
            let arguments = attribute.parse_args_with(Punctuated::<Expr, Token![,]>::parse_terminated);
            let flags =
                arguments.expect("arguments of clap").into_iter().filter_map(|argument| match argument {
                    Expr::Assign(named) if is_long(&named.left) => match *named.right {
                        Expr::Lit(ExprLit { lit: Lit::Str(name), .. }) => Some(name.value()),
                        _ => None,
                    },
                    other if is_long(&other) => {
                        Some(field.ident.as_ref()?.to_string().trim_start_matches("r#").replace('_', "-"))
                    }
                    _ => None,
                });
            self.flags.extend(flags.map(|flag| format!("--{flag}")));
        }
        visit::visit_field(self, field);
    }
}
