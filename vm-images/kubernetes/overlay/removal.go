package main

import (
	"errors"
	"fmt"
	"go/ast"
	"go/token"
)

// A removal takes one call out of a function: the statement that assigns its result, and the check of the error that
// follows. Other statements keep their text and their order.
type removal struct {
	function string
	// method is the name of the called method, whatever its receiver.
	method string
}

func (r removal) functionName() string { return r.function }

func (r removal) replacements(source parsed) ([]replacement, error) {
	statements, err := r.find(source)
	if err != nil {
		return nil, err
	}
	var removed []replacement
	for _, statement := range statements {
		removed = append(removed, replacement{source.offset(statement.Pos()), source.offset(statement.End()), ""})
	}
	return removed, nil
}

// find returns the two statements to remove.
func (r removal) find(source parsed) ([]ast.Stmt, error) {
	function := source.function(r.function, "")
	if function == nil {
		return nil, errors.New("expected to exist, and does not")
	}
	body := function.Body
	var found []ast.Stmt
	for index, statement := range body.List {
		assignment, isAssignment := statement.(*ast.AssignStmt)
		if !isAssignment || !calls(assignment, r.method) {
			continue
		}
		if found != nil {
			return nil, fmt.Errorf("expected one call of %s, and found more", r.method)
		}
		name := lastName(assignment)
		if index+1 == len(body.List) || !checksError(body.List[index+1], name) {
			return nil, fmt.Errorf("expected `if %s != nil { return .. }` after the call of %s", name, r.method)
		}
		if assignment.Tok == token.DEFINE && usedAfter(body.List[index+2:], name) {
			return nil, fmt.Errorf("expected no use of %s after the call of %s, which declares it", name, r.method)
		}
		found = []ast.Stmt{assignment, body.List[index+1]}
	}
	if found == nil {
		return nil, fmt.Errorf("expected a statement that assigns the result of %s, and found none", r.method)
	}
	return found, nil
}

func calls(assignment *ast.AssignStmt, method string) bool {
	if len(assignment.Rhs) != 1 {
		return false
	}
	call, isCall := assignment.Rhs[0].(*ast.CallExpr)
	if !isCall {
		return false
	}
	selector, isSelector := call.Fun.(*ast.SelectorExpr)
	return isSelector && selector.Sel.Name == method
}

// lastName returns the variable that has the error.
func lastName(assignment *ast.AssignStmt) string {
	if name, isName := assignment.Lhs[len(assignment.Lhs)-1].(*ast.Ident); isName {
		return name.Name
	}
	return ""
}

// checksError reports whether the statement is `if NAME != nil` with a return as the only statement of its body.
func checksError(statement ast.Stmt, name string) bool {
	check, isIf := statement.(*ast.IfStmt)
	if !isIf || check.Init != nil || check.Else != nil || len(check.Body.List) != 1 {
		return false
	}
	if _, returns := check.Body.List[0].(*ast.ReturnStmt); !returns {
		return false
	}
	comparison, isComparison := check.Cond.(*ast.BinaryExpr)
	if !isComparison || comparison.Op != token.NEQ {
		return false
	}
	left, isName := comparison.X.(*ast.Ident)
	right, isNil := comparison.Y.(*ast.Ident)
	return isName && isNil && left.Name == name && right.Name == "nil"
}

func usedAfter(statements []ast.Stmt, name string) bool {
	used := false
	for _, statement := range statements {
		ast.Inspect(statement, func(node ast.Node) bool {
			identifier, isName := node.(*ast.Ident)
			used = used || isName && identifier.Name == name
			return !used
		})
	}
	return used
}
