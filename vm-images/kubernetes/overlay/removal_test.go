package main

import (
	"strings"
	"testing"
)

const source = `package p

func Map(util Util) error {
	first := util.Map()
	if first != nil {
		return first
	}

	// Holds the device open.
	_, first = util.Attach("x")
	if first != nil {
		return wrap(first)
	}

	return nil
}
`

func TestARemovalTakesTheCallAndItsCheckAndNothingElse(t *testing.T) {
	changed, err := rewrite("p.go", []byte(source), []edit{removal{"Map", "Attach"}})
	if err != nil {
		t.Fatal(err)
	}
	if text := string(changed); strings.Contains(text, "Attach") || !strings.Contains(text, "util.Map()") {
		t.Fatal(text)
	}
}

func TestARemovalFromAnUnexpectedSourceFailsWithFileFunctionAndExpectation(t *testing.T) {
	for _, test := range []struct {
		name, old, new, expected string
	}{
		{"function renamed", "func Map", "func Bind", "p.go: function Map: expected to exist"},
		{"call moved", "util.Attach", "util.Other", "expected a statement that assigns the result of Attach"},
		{"no check", "if first != nil {\n\t\treturn wrap", "if true {\n\t\treturn wrap", "expected `if first != nil { return .. }`"},
		{"more in the check", "return wrap(first)", "count++\n\t\treturn first", "expected `if first != nil"},
		{"called twice", "return nil", "_, first = util.Attach(\"y\")\n\tif first != nil {\n\t\treturn first\n\t}\n\treturn nil", "found more"},
		{"declared there and used later", "_, first = util.Attach(\"x\")\n\tif first != nil {\n\t\treturn wrap(first)\n\t}\n\n\treturn nil",
			"_, last := util.Attach(\"x\")\n\tif last != nil {\n\t\treturn last\n\t}\n\n\treturn last", "expected no use of last"},
	} {
		changed := strings.Replace(source, test.old, test.new, 1)
		if changed == source {
			t.Fatalf("%s changes nothing", test.name)
		}
		_, err := rewrite("p.go", []byte(changed), []edit{removal{"Map", "Attach"}})
		if err == nil || !strings.Contains(err.Error(), test.expected) {
			t.Errorf("%s: %v", test.name, err)
		}
	}
}
