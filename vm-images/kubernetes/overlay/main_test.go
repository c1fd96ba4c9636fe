package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"
)

// The module `other` of the tests has a function that returns 1. The overlay changes that to what `added.go` and the
// package `other/native` return.
var (
	otherModule = module{
		path:  "example.invalid/other",
		edits: map[string][]edit{"other.go": {insertion{"func Number() int", "return added()"}}},
		added: map[string]string{"added.go": "_glue/added.go", "native": "native"},
	}
	addedSources = fstest.MapFS{
		"_glue/added.go":        {Data: []byte("package other\n\nimport \"example.invalid/other/native\"\n\nfunc added() int { return native.Number }\n")},
		"native/native.go":      {Data: []byte("package native\n\nconst Number = 42\n")},
		"native/native_test.go": {Data: []byte("not Go")},
	}
)

// prepare writes a main module that prints the number, and the module `other`, and makes the main module the current
// directory. It returns the directory of `other`.
func prepare(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	for name, content := range map[string]string{
		"main/go.mod":    "module example.invalid/main\n\ngo 1.26.0\n\nrequire example.invalid/other v0.0.0\n\nreplace example.invalid/other => ../other\n",
		"main/go.sum":    "",
		"main/main.go":   "package main\n\nimport \"example.invalid/other\"\n\nfunc main() { print(other.Number()) }\n",
		"other/go.mod":   "module example.invalid/other\n\ngo 1.26.0\n",
		"other/other.go": "package other\n\nfunc Number() int { return 1 }\n",
	} {
		if err := writeFile(filepath.Join(root, name), []byte(content)); err != nil {
			t.Fatal(err)
		}
	}
	t.Chdir(filepath.Join(root, "main"))
	return filepath.Join(root, "other")
}

func number(t *testing.T, flags ...string) string {
	t.Helper()
	output, err := exec.Command("go", append(append([]string{"run"}, flags...), ".")...).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, output)
	}
	return string(output)
}

func TestAProgramBuiltWithTheOverlayRunsTheChangedAndAddedSources(t *testing.T) {
	other, output := prepare(t), filepath.Join(t.TempDir(), "output")
	if found := number(t); found != "1" {
		t.Fatal(found)
	}
	// The second time, the output of the first is in place.
	for range 2 {
		if err := write(output, []module{otherModule}, addedSources, map[string]string{otherModule.path: other}); err != nil {
			t.Fatal(err)
		}
	}
	if found := number(t, "-modfile", filepath.Join(output, "go.mod"), "-overlay", filepath.Join(output, "overlay.json")); found != "42" {
		t.Fatal(found)
	}
	if found := number(t); found != "1" {
		t.Fatalf("the module itself has changed: %s", found)
	}
}

func TestTestsOfAddedPackagesAreLeftOut(t *testing.T) {
	other, output := prepare(t), t.TempDir()
	if err := write(output, []module{otherModule}, addedSources, map[string]string{otherModule.path: other}); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(output, "overlay.json"))
	if err != nil {
		t.Fatal(err)
	}
	var overlay struct{ Replace map[string]string }
	if err := json.Unmarshal(text, &overlay); err != nil {
		t.Fatal(err)
	}
	for file := range overlay.Replace {
		if strings.HasSuffix(file, "_test.go") {
			t.Error(file)
		}
	}
	if len(overlay.Replace) != 3 {
		t.Errorf("%v", overlay.Replace)
	}
}

func TestAnAddedNameThatExistsUpstreamFailsAndLeavesNoOverlay(t *testing.T) {
	for _, name := range []string{"added.go", "native/other.go"} {
		other, output := prepare(t), t.TempDir()
		directories := map[string]string{otherModule.path: other}
		if err := write(output, []module{otherModule}, addedSources, directories); err != nil {
			t.Fatal(err)
		}
		if err := writeFile(filepath.Join(other, name), []byte("package x\n")); err != nil {
			t.Fatal(err)
		}
		err := write(output, []module{otherModule}, addedSources, directories)
		expected := "module example.invalid/other: " + strings.Split(name, "/")[0] + ": expected not to exist"
		if err == nil || !strings.Contains(err.Error(), expected) {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := os.Stat(filepath.Join(output, "overlay.json")); err == nil {
			t.Errorf("%s: the overlay of the earlier run is still there", name)
		}
	}
}

func TestAMissingFileFailsWithItsName(t *testing.T) {
	other, output := prepare(t), t.TempDir()
	if err := os.Remove(filepath.Join(other, "other.go")); err != nil {
		t.Fatal(err)
	}
	err := write(output, []module{otherModule}, addedSources, map[string]string{otherModule.path: other})
	if err == nil || !strings.Contains(err.Error(), "module example.invalid/other: other.go: expected to exist") {
		t.Fatal(err)
	}
}

func TestADirectoryWithoutGoModFailsWithTheRemedy(t *testing.T) {
	other := prepare(t)
	t.Chdir(t.TempDir())
	err := write(t.TempDir(), []module{otherModule}, addedSources, map[string]string{otherModule.path: other})
	if err == nil || !strings.Contains(err.Error(), "run overlay in the directory of the go.mod") {
		t.Fatal(err)
	}
}

func TestModuleArgumentsNameEachModuleOnceWithAnAbsoluteDirectory(t *testing.T) {
	modules := []module{{path: "a/b"}, {path: "c"}}
	directories, err := moduleDirectories(modules, []string{"c=/x=y", "a/b=/z"})
	if err != nil || directories["c"] != "/x=y" || directories["a/b"] != "/z" {
		t.Fatal(directories, err)
	}
	for expected, arguments := range map[string][]string{
		"no source of the module \"d\"":                             {"a/b=/z", "c=/x", "d=/y"},
		"the module c is given twice":                               {"a/b=/z", "c=/x", "c=/y"},
		"must be an absolute path":                                  {"a/b=/z", "c"},
		"the directory of the module c is missing; add c=DIRECTORY": {"a/b=/z"},
	} {
		if _, err := moduleDirectories(modules, arguments); err == nil || !strings.Contains(err.Error(), expected) {
			t.Errorf("%s: %v", expected, err)
		}
	}
}

// The source of every addition exists, and every signature is Go: the build of a kubelet would notice it only minutes
// later.
func TestTheChangesOfKubernetesReferToEmbeddedSourcesAndValidSignatures(t *testing.T) {
	for _, module := range changed {
		files := map[string][]byte{}
		for name, from := range module.added {
			if err := addFiles(files, name, sources, from); err != nil {
				t.Error(err)
			}
		}
		if len(files) == 0 {
			t.Errorf("%s: nothing is added", module.path)
		}
		for _, edits := range module.edits {
			for _, edit := range edits {
				if insertion, isInsertion := edit.(insertion); isInsertion {
					if _, err := insertion.expected(); err != nil {
						t.Error(err)
					}
				}
			}
		}
	}
}
