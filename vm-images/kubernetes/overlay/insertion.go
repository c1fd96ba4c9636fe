package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
)

// An insertion puts statements of ours at the start of a function's body. The rest of the function keeps its text.
type insertion struct {
	// signature is the expected declaration of the function: its receiver, parameters and results, with their names.
	// The statements use these names.
	signature string
	// statements are the text to insert.
	statements string
}

func (i insertion) functionName() string {
	expected, err := i.expected()
	if err != nil {
		return i.signature
	}
	return expected.Name.Name
}

func (i insertion) replacements(source parsed) ([]replacement, error) {
	expected, err := i.expected()
	if err != nil {
		return nil, err
	}
	function := source.function(expected.Name.Name, receiverType(expected))
	if function == nil {
		return nil, fmt.Errorf("expected `%s` to exist, and it does not", signature(expected))
	}
	if found, expected := signature(function), signature(expected); found != expected {
		return nil, fmt.Errorf("expected `%s`, and found `%s`", expected, found)
	}
	start := source.offset(function.Body.Lbrace) + 1
	return []replacement{{start, start, "\n\t" + i.statements + "\n"}}, nil
}

// expected returns the syntax tree of the signature.
func (i insertion) expected() (*ast.FuncDecl, error) {
	tree, err := parser.ParseFile(token.NewFileSet(), "signature", "package p\n"+i.signature+" {}\n", parser.SkipObjectResolution)
	if err != nil {
		return nil, fmt.Errorf("the expected signature `%s` is not Go: %w", i.signature, err)
	}
	function, isFunction := tree.Decls[0].(*ast.FuncDecl)
	if !isFunction {
		return nil, fmt.Errorf("the expected signature `%s` is not that of a function", i.signature)
	}
	return function, nil
}
