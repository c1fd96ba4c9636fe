//! The names in an expression of PromQL. It is assumed to be valid, which promtool checks.

use std::collections::BTreeSet;
use std::iter::Peekable;
use std::vec::IntoIter;

/// Words before the labels of a matching or an aggregation.
const BEFORE_LABELS: [&str; 6] = ["by", "group_left", "group_right", "ignoring", "on", "without"];
/// Words that are neither labels nor metrics, and may stand without a parenthesis behind them.
const KEYWORDS: [&str; 11] =
    ["and", "avg", "bool", "count", "max", "min", "offset", "or", "quantile", "sum", "unless"];

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Names {
    pub(super) metrics: BTreeSet<String>,
    pub(super) labels: BTreeSet<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Token<'a> {
    Word(&'a str),
    Mark(char),
}

/// Splits an expression. Omits spaces and quoted texts.
fn tokens(expression: &str) -> Vec<Token<'_>> {
    let is_word = |character: char| character.is_ascii_alphanumeric() || "_:$.".contains(character);
    let mut tokens = Vec::new();
    let mut rest = expression;
    while let Some(first) = rest.chars().next() {
        let length = if first == '"' {
            // No text has an escaped quotation mark.
            1 + rest[1..].find('"').expect("a text ends with a quotation mark") + 1
        } else if is_word(first) {
            rest.find(|character: char| !is_word(character)).unwrap_or(rest.len())
        } else {
            first.len_utf8()
        };
        let (token, after) = rest.split_at(length);
        if is_word(first) {
            tokens.push(Token::Word(token));
        } else if first != '"' && !first.is_whitespace() {
            tokens.push(Token::Mark(first));
        }
        rest = after;
    }
    tokens
}

/// Returns the words up to the mark, and consumes the mark too.
fn words_until(tokens: &mut Peekable<IntoIter<Token<'_>>>, end: char) -> Vec<String> {
    let inside = tokens.by_ref().take_while(|token| *token != Token::Mark(end));
    let words = inside.filter_map(|token| match token {
        Token::Word(word) => Some(word.to_owned()),
        Token::Mark(_) => None,
    });
    words.collect()
}

/// Returns the metrics of an expression, and the labels that it selects, groups or matches by.
pub(super) fn names(expression: &str) -> Names {
    let mut names = Names::default();
    let mut tokens = tokens(expression).into_iter().peekable();
    while let Some(token) = tokens.next() {
        match token {
            Token::Word(word) if BEFORE_LABELS.contains(&word) => {
                names.labels.extend(words_until(&mut tokens, ')'));
            }
            Token::Mark('{') => names.labels.extend(words_until(&mut tokens, '}')),
            // The time range.
            Token::Mark('[') => drop(words_until(&mut tokens, ']')),
            Token::Word(word) => {
                let is_number = word.starts_with(|character: char| character.is_ascii_digit());
                let is_function = tokens.peek() == Some(&Token::Mark('('));
                if !is_number && !is_function && !KEYWORDS.contains(&word) {
                    names.metrics.insert(word.to_owned());
                }
            }
            Token::Mark(_) => {}
        }
    }
    names
}

#[test]
fn metrics_and_labels_are_found() {
    let expression = r#"sum by (le, node) (rate(a_bucket{b=~"x|y",c!="a{b"}[$__rate_interval])) > 0.5 * time()
        unless on (d) min_over_time(e[5m] offset 1h) and f == 0"#;
    let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    let (metrics, labels) = (set(&["a_bucket", "e", "f"]), set(&["b", "c", "d", "le", "node"]));
    assert_eq!(names(expression), Names { metrics, labels });
}
