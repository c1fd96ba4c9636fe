package main

import (
	"fmt"
	"go/ast"
	"go/format"
	"go/parser"
	"go/token"
	"slices"
	"strings"
)

// An edit changes one function of a source file.
type edit interface {
	// replacements returns the changes of the text. It fails if the function is not as the edit expects.
	replacements(source parsed) ([]replacement, error)
	// functionName returns the name of the function, for messages.
	functionName() string
}

// parsed is a source file and its syntax tree.
type parsed struct {
	tree      *ast.File
	positions *token.FileSet
}

// replacement is a range of bytes in a source file, and the text that takes its place.
type replacement struct {
	start, end int
	text       string
}

// rewrite returns the source after the edits. It fails if a function does not look as an edit expects, because upstream
// has then changed the code that the edit relies on.
func rewrite(file string, source []byte, edits []edit) ([]byte, error) {
	positions := token.NewFileSet()
	tree, err := parser.ParseFile(positions, file, source, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	var all []replacement
	for _, edit := range edits {
		found, err := edit.replacements(parsed{tree, positions})
		if err != nil {
			return nil, fmt.Errorf("%s: function %s: %w", file, edit.functionName(), err)
		}
		all = append(all, found...)
	}
	// From the end, so that the offsets before stay valid.
	slices.SortFunc(all, func(one, other replacement) int { return other.start - one.start })
	for _, replacement := range all {
		source = slices.Concat(source[:replacement.start], []byte(replacement.text), source[replacement.end:])
	}
	if _, err := parser.ParseFile(token.NewFileSet(), file, source, 0); err != nil {
		return nil, fmt.Errorf("the rewritten source is no longer Go: %w", err)
	}
	return source, nil
}

// offset returns the number of bytes before a position.
func (s parsed) offset(position token.Pos) int {
	return s.positions.Position(position).Offset
}

// function returns the function with this name and receiver type, such as `*Mounter`. The receiver type of a function
// that is no method is "".
func (s parsed) function(name, receiver string) *ast.FuncDecl {
	for _, declaration := range s.tree.Decls {
		function, isFunction := declaration.(*ast.FuncDecl)
		if isFunction && function.Name.Name == name && function.Body != nil && receiverType(function) == receiver {
			return function
		}
	}
	return nil
}

func receiverType(function *ast.FuncDecl) string {
	if function.Recv == nil || len(function.Recv.List) != 1 {
		return ""
	}
	return text(function.Recv.List[0].Type)
}

// signature returns the declaration of a function without its body and its comment, formatted.
func signature(function *ast.FuncDecl) string {
	return text(&ast.FuncDecl{Recv: function.Recv, Name: function.Name, Type: function.Type})
}

// text returns the source of a node. Its positions are ignored, so that the line breaks of upstream do not matter.
func text(node ast.Node) string {
	var source strings.Builder
	if err := format.Node(&source, token.NewFileSet(), node); err != nil {
		return fmt.Sprintf("(%v)", err)
	}
	return strings.Join(strings.Fields(source.String()), " ")
}
