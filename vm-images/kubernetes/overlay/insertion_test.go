package main

import (
	"strings"
	"testing"
)

const methods = `package p

// Unmount unmounts.
func (m *Mounter) Unmount(
	target string, // where
	flags, more int,
) error {
	return run(target)
}

func (f Fake) Unmount(target string, flags, more int) error { return nil }

func Unmount() {}
`

const unmountSignature = "func (m *Mounter) Unmount(target string, flags, more int) error"

func TestAnInsertionPutsTheStatementsFirstAndKeepsTheRest(t *testing.T) {
	changed, err := rewrite("p.go", []byte(methods), []edit{insertion{unmountSignature, "if known(target) {\n\t\treturn nil\n\t}"}})
	if err != nil {
		t.Fatal(err)
	}
	expected := strings.Replace(methods, ") error {\n\treturn run", ") error {\n\tif known(target) {\n\t\treturn nil\n\t}\n\n\treturn run", 1)
	if string(changed) != expected {
		t.Fatalf("%s", changed)
	}
}

func TestAnInsertionSelectsTheMethodByItsReceiver(t *testing.T) {
	changed, err := rewrite("p.go", []byte(methods), []edit{insertion{"func Unmount()", "first()"}})
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(changed), "func Unmount() {\n\tfirst()\n}") {
		t.Fatalf("%s", changed)
	}
}

func TestSeveralEditsOfOneFileAllTakeEffect(t *testing.T) {
	changed, err := rewrite("p.go", []byte(methods), []edit{
		insertion{"func Unmount()", "first()"},
		insertion{unmountSignature, "second()"},
		insertion{"func (f Fake) Unmount(target string, flags, more int) error", "third()"},
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, expected := range []string{"{\n\tfirst()\n}", "error {\n\tsecond()\n\n\treturn run", "error {\n\tthird()\n return nil }"} {
		if !strings.Contains(string(changed), expected) {
			t.Errorf("no %q in %s", expected, changed)
		}
	}
}

func TestAnInsertionIntoAnUnexpectedSourceFailsWithFileFunctionAndExpectation(t *testing.T) {
	for _, test := range []struct{ name, old, new, expected string }{
		{"method renamed", "(m *Mounter) Unmount", "(m *Mounter) Umount", "p.go: function Unmount: expected `func (m *Mounter) Unmount(target string, flags, more int) error` to exist"},
		{"receiver renamed", "(m *Mounter)", "(m Mounter)", "to exist, and it does not"},
		{"parameter renamed", "target string, // where", "path string,", "and found `func (m *Mounter) Unmount(path string, flags, more int) error`"},
		{"parameter of another type", "more int,", "more uint,", "and found `func (m *Mounter) Unmount(target string, flags, more uint) error`"},
		{"receiver variable renamed", "(m *Mounter)", "(n *Mounter)", "and found `func (n *Mounter) Unmount"},
		{"another result", ") error {", ") (bool, error) {", "and found `func (m *Mounter) Unmount(target string, flags, more int) (bool, error)`"},
		{"file that is not Go", "package p", "package", "p.go:"},
	} {
		changed := strings.Replace(methods, test.old, test.new, 1)
		if changed == methods {
			t.Fatalf("%s changes nothing", test.name)
		}
		_, err := rewrite("p.go", []byte(changed), []edit{insertion{unmountSignature, "x()"}})
		if err == nil || !strings.Contains(err.Error(), test.expected) {
			t.Errorf("%s: %v", test.name, err)
		}
	}
}

func TestAnInsertionThatIsNotGoFails(t *testing.T) {
	for expected, insertion := range map[string]insertion{
		"is no longer Go":                   {unmountSignature, "if {"},
		"signature `func (` is not Go":      {"func (", "x()"},
		"is not that of a function":         {"var x = struct{}", "x()"},
		"expected `func Unmount(a, b int)`": {"func Unmount(a, b int)", "x()"},
	} {
		_, err := rewrite("p.go", []byte(methods), []edit{insertion})
		if err == nil || !strings.Contains(err.Error(), expected) {
			t.Errorf("%s: %v", expected, err)
		}
	}
}
