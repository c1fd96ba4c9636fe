// Overlay writes changed copies of sources of Kubernetes, and the file that `go build -overlay` takes. It contains no
// source of Kubernetes: it finds what to change by the syntax tree, and fails if the source is not as expected.
package main

import (
	"bytes"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

const usage = `Writes what "go build" needs to build changed sources of Kubernetes.

usage: overlay OUTPUT_DIRECTORY MODULE=DIRECTORY...
       overlay --modules

MODULE is a Go module whose sources are changed, and DIRECTORY the absolute path of
its sources, which "go list -m -f '{{.Dir}}' MODULE" prints. All modules that
--modules lists are needed.

Run it in the directory of the go.mod that requires the modules, and build there with
"go build -modfile OUTPUT_DIRECTORY/go.mod -overlay OUTPUT_DIRECTORY/overlay.json".
OUTPUT_DIRECTORY must not change until the build has ended.
`

func main() {
	arguments := os.Args[1:]
	switch {
	case slices.Equal(arguments, []string{"--help"}):
		fmt.Print(usage)
	case slices.Equal(arguments, []string{"--modules"}):
		for _, module := range changed {
			fmt.Println(module.path)
		}
	case len(arguments) < 2:
		fmt.Fprint(os.Stderr, usage)
		os.Exit(2)
	default:
		directories, err := moduleDirectories(changed, arguments[1:])
		if err != nil {
			fmt.Fprintf(os.Stderr, "overlay: %v\n", err)
			os.Exit(2)
		}
		if err := write(arguments[0], changed, sources, directories); err != nil {
			fmt.Fprintf(os.Stderr, "overlay: %v\n", err)
			os.Exit(1)
		}
	}
}

// sources are the files that the overlay adds to Kubernetes.
//
//go:embed _glue native
var sources embed.FS

// A module is a Go module whose sources the overlay changes.
type module struct {
	path string
	// edits are the changes of its files. The keys are relative to the module.
	edits map[string][]edit
	// added are the files and directories of ours that are put into the module: the key is relative to the module, and
	// the value is the path in this directory.
	added map[string]string
}

// moduleDirectories parses the arguments MODULE=DIRECTORY, and checks that they name each of the modules once.
func moduleDirectories(modules []module, arguments []string) (map[string]string, error) {
	directories := map[string]string{}
	for _, argument := range arguments {
		path, directory, _ := strings.Cut(argument, "=")
		if !slices.ContainsFunc(modules, func(module module) bool { return module.path == path }) {
			return nil, fmt.Errorf("%q: no source of the module %q is changed; `overlay --modules` lists the modules", argument, path)
		}
		if _, repeated := directories[path]; repeated {
			return nil, fmt.Errorf("%q: the module %s is given twice", argument, path)
		}
		if !filepath.IsAbs(directory) {
			return nil, fmt.Errorf("%q: the directory of the module must be an absolute path; if `go list -m` prints none, run `go mod download %s`", argument, path)
		}
		directories[path] = directory
	}
	for _, module := range modules {
		if _, given := directories[module.path]; !given {
			return nil, fmt.Errorf("the directory of the module %s is missing; add %[1]s=DIRECTORY", module.path)
		}
	}
	return directories, nil
}

// write writes the changed and the added sources of all modules, go.mod and go.sum, and then overlay.json, to the
// directory output. It can be repeated with the same directory.
func write(output string, modules []module, sources fs.FS, directories map[string]string) error {
	output, err := filepath.Abs(output)
	if err != nil {
		return err
	}
	list := filepath.Join(output, "overlay.json")
	// An overlay of an earlier run would lack the error of this one.
	if err := os.Remove(list); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	replaced, links := map[string]string{}, map[string]string{}
	for _, module := range modules {
		directory, target := directories[module.path], filepath.Join(output, "changed", filepath.FromSlash(module.path))
		links[module.path] = filepath.Join(output, "modules", filepath.FromSlash(module.path))
		files, err := module.files(directory, sources)
		if err != nil {
			return fmt.Errorf("module %s: %w", module.path, err)
		}
		for file, content := range files {
			if err := writeFile(filepath.Join(target, file), content); err != nil {
				return err
			}
			replaced[filepath.Join(links[module.path], file)] = filepath.Join(target, file)
		}
		if err := link(directory, links[module.path]); err != nil {
			return err
		}
	}
	if err := writeGoMod(output, links); err != nil {
		return err
	}
	text, err := json.MarshalIndent(map[string]any{"Replace": replaced}, "", "  ")
	if err != nil {
		return err
	}
	return writeFile(list, text)
}

// link makes a symbolic link to the directory of a module. Go refuses to replace files below its module cache, and
// recognises them by their path.
func link(directory, at string) error {
	if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
		return err
	}
	if err := os.Remove(at); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.Symlink(directory, at)
}

// writeGoMod writes copies of go.mod and go.sum of the current directory, which take the modules from the links.
func writeGoMod(output string, links map[string]string) error {
	for _, name := range []string{"go.mod", "go.sum"} {
		content, err := os.ReadFile(name)
		if err != nil {
			return fmt.Errorf("%w; run overlay in the directory of the go.mod that requires the modules", err)
		}
		if err := writeFile(filepath.Join(output, name), content); err != nil {
			return err
		}
	}
	arguments := []string{"mod", "edit"}
	for _, path := range slices.Sorted(maps.Keys(links)) {
		arguments = append(arguments, "-replace="+path+"="+links[path])
	}
	command := exec.Command("go", append(arguments, filepath.Join(output, "go.mod"))...)
	if text, err := command.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", command, err, bytes.TrimSpace(text))
	}
	return nil
}

// files returns the changed and the added files of a module, whose sources are in the directory.
func (m module) files(directory string, sources fs.FS) (map[string][]byte, error) {
	files := map[string][]byte{}
	for file, edits := range m.edits {
		source, err := os.ReadFile(filepath.Join(directory, file))
		if err != nil {
			return nil, fmt.Errorf("%s: expected to exist: %w", file, err)
		}
		if files[file], err = rewrite(file, source, edits); err != nil {
			return nil, err
		}
	}
	for name, from := range m.added {
		// A directory of that name would mix its files with ours.
		if _, err := os.Lstat(filepath.Join(directory, name)); err == nil {
			return nil, fmt.Errorf("%s: expected not to exist, because the overlay adds it, and it exists upstream", name)
		} else if !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		if err := addFiles(files, name, sources, from); err != nil {
			return nil, err
		}
	}
	return files, nil
}

// addFiles adds a file or the files of a directory, except for tests, by its name in the module.
func addFiles(files map[string][]byte, name string, sources fs.FS, from string) error {
	return fs.WalkDir(sources, from, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || strings.HasSuffix(path, "_test.go") {
			return err
		}
		files[name+strings.TrimPrefix(path, from)], err = fs.ReadFile(sources, path)
		return err
	})
}

func writeFile(path string, content []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, content, 0o644)
}
