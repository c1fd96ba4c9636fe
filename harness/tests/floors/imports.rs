//! Finds the files of a crate that use a name from another of its files.
//!
//! The graph is read from the sources, without expanding macros: `use` lines, paths in code, and paths in the
//! tokens of macro calls and attributes. A name is followed through re-exports and private imports to the
//! file that defines it, so an edge never ends at a `mod.rs` that only re-exports. Method calls are not
//! considered, but the type's path is.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Attribute, Item, Meta, UseTree};

/// The files of one crate and their imports of each other. A file is named by its path below `src`, without `.rs`, and without
/// `mod` or a program's `main` at the end: `cluster/node`, `cluster`, `bin/dbg`.
pub(crate) struct Imports {
    pub(crate) files: BTreeMap<String, BTreeSet<String>>,
}

impl Imports {
    /// Reads the library and the programs of the crate in `directory`. Tests are omitted: modules and items
    /// under `cfg(test)`, and everything outside `src`.
    pub(crate) fn read(directory: &Path, library: &str) -> Imports {
        let sources = directory.join("src");
        let mut modules = Modules { sources: sources.clone(), library: library.to_owned(), all: Vec::new() };
        for root in roots(&sources) {
            modules.load_root(&root);
        }
        let mut files: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for module in &modules.all {
            files.entry(module.file.clone()).or_default();
        }
        for (index, module) in modules.all.iter().enumerate() {
            for path in &module.references {
                let Some(Target::Item(file)) = modules.resolve(index, path, &mut BTreeSet::new()) else {
                    continue;
                };
                if file != module.file {
                    files.entry(module.file.clone()).or_default().insert(file);
                }
            }
        }
        Imports { files }
    }

    /// Returns the sets of files that reach each other, each sorted.
    pub(crate) fn circles(&self) -> BTreeSet<Vec<String>> {
        let reach: BTreeMap<&str, BTreeSet<&str>> =
            self.files.keys().map(|file| (file.as_str(), self.reachable(file))).collect();
        let circle = |file: &str| -> Vec<String> {
            let others = reach[file].iter().filter(|other| reach[**other].contains(file));
            others.map(|other| (*other).to_owned()).collect()
        };
        self.files.keys().map(|file| circle(file)).filter(|circle| circle.len() > 1).collect()
    }

    fn reachable(&self, from: &str) -> BTreeSet<&str> {
        let mut seen = BTreeSet::new();
        let mut open: Vec<&str> = self.files[from].iter().map(String::as_str).collect();
        while let Some(file) = open.pop() {
            if seen.insert(file) {
                open.extend(self.files[file].iter().map(String::as_str));
            }
        }
        seen
    }
}

/// Returns the root files of a crate's library and programs.
fn roots(sources: &Path) -> Vec<PathBuf> {
    let mut roots = vec![sources.join("lib.rs"), sources.join("main.rs")];
    if let Ok(programs) = fs::read_dir(sources.join("bin")) {
        for program in programs {
            let path = program.expect("read src/bin").path();
            roots.push(if path.is_dir() { path.join("main.rs") } else { path });
        }
    }
    roots.retain(|root| root.is_file());
    roots
}

/// Returns `true` if the item exists only in tests.
pub(crate) fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().filter(|attribute| attribute.path().is_ident("cfg")).any(|attribute| {
        let Meta::List(list) = &attribute.meta else { return false };
        list.parse_args::<Meta>().is_ok_and(|condition| needs_test(&condition))
    })
}

fn needs_test(condition: &Meta) -> bool {
    match condition {
        Meta::Path(path) => path.is_ident("test"),
        Meta::List(list) if list.path.is_ident("all") => {
            let conditions = syn::punctuated::Punctuated::<Meta, syn::Token![,]>::parse_terminated;
            list.parse_args_with(conditions).is_ok_and(|all| all.iter().any(needs_test))
        }
        _ => false,
    }
}

pub(crate) fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

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
}

enum Target {
    Module(usize),
    Item(String),
}

struct Modules {
    sources: PathBuf,
    /// The name of the library in the crate's programs.
    library: String,
    all: Vec<Module>,
}

impl Modules {
    fn load_root(&mut self, path: &Path) {
        let directory = path.parent().expect("a source file has a directory").to_owned();
        self.load_file(path, &directory, None);
    }

    /// Loads a file and the modules that it declares, whose files are in `directory`.
    fn load_file(&mut self, path: &Path, directory: &Path, parent: Option<usize>) -> usize {
        let text =
            fs::read_to_string(path).unwrap_or_else(|error| panic!("read {}: {error}", path.display()));
        let parsed =
            syn::parse_file(&text).unwrap_or_else(|error| panic!("parse {}: {error}", path.display()));
        let file = name(path.strip_prefix(&self.sources).expect("it is below src"));
        self.load_items(&file, &parsed.items, directory, parent)
    }

    fn load_items(&mut self, file: &str, items: &[Item], directory: &Path, parent: Option<usize>) -> usize {
        let index = self.all.len();
        self.all.push(Module {
            file: file.to_owned(),
            parent,
            children: BTreeMap::new(),
            items: BTreeSet::new(),
            imports: Vec::new(),
            globs: Vec::new(),
            references: Vec::new(),
        });
        for item in items.iter().filter(|item| !is_test(attributes(item))) {
            if let Item::Mod(child) = item {
                let name = child.ident.to_string();
                let below = directory.join(&name);
                let child = match &child.content {
                    Some((_, items)) => self.load_items(file, items, &below, Some(index)),
                    None => {
                        let candidates = [directory.join(format!("{name}.rs")), below.join("mod.rs")];
                        let path = declared_path(&child.attrs).map(|path| directory.join(path));
                        let path = path.or_else(|| candidates.into_iter().find(|path| path.is_file()));
                        let path = path
                            .unwrap_or_else(|| panic!("no file of module {name} in {}", directory.display()));
                        self.load_file(&path, &below, Some(index))
                    }
                };
                self.all[index].children.insert(name, child);
                continue;
            }
            let module = &mut self.all[index];
            if let Some(name) = defined(item) {
                module.items.insert(name);
            }
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

    fn root(&self, module: usize) -> usize {
        self.all[module].parent.map_or(module, |parent| self.root(parent))
    }

    /// Follows a path from a module. Returns `None` if it leads out of the crate.
    fn resolve(&self, from: usize, path: &[String], seen: &mut BTreeSet<(usize, String)>) -> Option<Target> {
        let (mut at, mut explicit) = (from, false);
        let mut names = path.iter().enumerate().peekable();
        while let Some((position, name)) = names.peek() {
            at = match name.as_str() {
                "crate" => self.root(at),
                "self" => at,
                "super" => self.all[at].parent?,
                name if *position == 0
                    && name == self.library
                    && !self.all[from].children.contains_key(name) =>
                {
                    self.all.iter().position(|module| module.file == "lib")?
                }
                _ => break,
            };
            explicit = true;
            names.next();
        }
        let mut target = Target::Module(at);
        for (position, name) in names {
            let Target::Module(module) = target else { break };
            target = match self.lookup(module, name, position + 1 == path.len(), seen) {
                Some(target) => target,
                // The name comes from a macro, or from another crate that the module re-exports.
                None if explicit => Target::Item(self.all[module].file.clone()),
                None => return None,
            };
            explicit = true;
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
        let module = &self.all[at];
        let item = || module.items.contains(name).then(|| Target::Item(module.file.clone()));
        let child = || module.children.get(name).map(|child| Target::Module(*child));
        let found = if last { item().or_else(child) } else { child().or_else(item) };
        if found.is_some() || !seen.insert((at, name.to_owned())) {
            return found;
        }
        let imports = module.imports.iter().filter(|(import, _)| import == name);
        let imported = imports.filter_map(|(_, path)| self.resolve(at, path, seen)).collect::<Vec<_>>();
        // A module and a function can have the same name. The last segment refers to the item.
        let (items, modules): (Vec<_>, Vec<_>) =
            imported.into_iter().partition(|target| matches!(target, Target::Item(_)));
        let imported = if last {
            items.into_iter().chain(modules).next()
        } else {
            modules.into_iter().chain(items).next()
        };
        imported.or_else(|| {
            module.globs.iter().find_map(|path| match self.resolve(at, path, seen)? {
                Target::Module(other) => self.lookup(other, name, last, seen),
                Target::Item(_) => None,
            })
        })
    }
}

/// Returns the name of a file from its path below `src`.
fn name(path: &Path) -> String {
    let path = path.with_extension("");
    let parts: Vec<_> = path.iter().map(|part| part.to_string_lossy().into_owned()).collect();
    match parts.as_slice() {
        [above @ .., last] if !above.is_empty() && (last == "mod" || last == "main") => above.join("/"),
        parts => parts.join("/"),
    }
}

fn declared_path(attributes: &[Attribute]) -> Option<String> {
    let path = attributes.iter().find(|attribute| attribute.path().is_ident("path"))?;
    let Meta::NameValue(value) = &path.meta else { return None };
    let syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }) = &value.value else { return None };
    Some(text.value())
}

fn defined(item: &Item) -> Option<String> {
    let ident = match item {
        Item::Const(item) => &item.ident,
        Item::Enum(item) => &item.ident,
        Item::Fn(item) => &item.sig.ident,
        Item::Macro(item) => item.ident.as_ref()?,
        Item::Static(item) => &item.ident,
        Item::Struct(item) => &item.ident,
        Item::Trait(item) => &item.ident,
        Item::Type(item) => &item.ident,
        Item::Union(item) => &item.ident,
        _ => return None,
    };
    Some(ident.to_string())
}

/// Calls `each` with the path and the local name of each import; a glob has no name.
fn flatten(tree: &UseTree, above: &mut Vec<String>, each: &mut impl FnMut(Vec<String>, Option<String>)) {
    match tree {
        UseTree::Path(path) => {
            above.push(path.ident.to_string());
            flatten(&path.tree, above, each);
            above.pop();
        }
        UseTree::Name(name) if name.ident == "self" => each(above.clone(), above.last().cloned()),
        UseTree::Name(name) => {
            let path = above.iter().cloned().chain([name.ident.to_string()]).collect();
            each(path, Some(name.ident.to_string()));
        }
        UseTree::Rename(rename) => {
            let last = (rename.ident != "self").then(|| rename.ident.to_string());
            each(above.iter().cloned().chain(last).collect(), Some(rename.rename.to_string()));
        }
        UseTree::Glob(_) => each(above.clone(), None),
        UseTree::Group(group) => group.items.iter().for_each(|tree| flatten(tree, above, each)),
    }
}

impl Module {
    /// Adds the paths among unparsed tokens: `a :: b :: c`.
    fn references_in(&mut self, tokens: TokenStream) {
        let mut path: Vec<String> = Vec::new();
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Ident(ident) => {
                    if colons != 2 {
                        self.refer(std::mem::take(&mut path));
                    }
                    path.push(ident.to_string());
                    colons = 0;
                }
                TokenTree::Punct(punct) if punct.as_char() == ':' => colons += 1,
                TokenTree::Group(group) => {
                    self.refer(std::mem::take(&mut path));
                    self.references_in(group.stream());
                    colons = 0;
                }
                TokenTree::Punct(_) | TokenTree::Literal(_) => {
                    self.refer(std::mem::take(&mut path));
                    colons = 0;
                }
            }
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
        if !is_test(attributes(item)) {
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
        self.references_in(call.tokens.clone());
    }

    fn visit_attribute(&mut self, attribute: &'ast Attribute) {
        if let Meta::List(list) = &attribute.meta {
            self.references_in(list.tokens.clone());
        }
    }

    // `pub(in crate::x)` imports nothing.
    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {}
}
