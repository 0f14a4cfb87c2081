//! YAML, of which only whole lines are added and removed: there is no writer that keeps comments.

use saphyr_parser::{Event, Parser, ScalarStyle, Span};

use super::{EditError, Spot};
use crate::clients::entry::ConfigValue;

/// Maps and lists within one another.
const MAX_DEPTH: usize = 64;

/// A value and the lines that it is on, counted from 1.
#[derive(Debug)]
struct Located {
    value: LocatedValue,
    /// The last line with something of it.
    last_line: usize,
}

#[derive(Debug)]
enum LocatedValue {
    /// Anything but a map.
    Other(ConfigValue),
    Map {
        /// Each key with its line and its column, counted from 0.
        fields: Vec<(String, usize, usize, Located)>,
        /// Written with braces; the index of the first, in characters.
        braces: Option<usize>,
    },
}

struct Reader<'a> {
    parser: Parser<'a, saphyr_parser::StrInput<'a>>,
    text: &'a str,
}

pub(super) fn parse(text: &str) -> Result<ConfigValue, EditError> {
    Ok(read(text)?.map_or_else(|| ConfigValue::Map(Vec::new()), |root| root.node()))
}

/// The only document of a text; `None` if it has comments only.
fn read(text: &str) -> Result<Option<Located>, EditError> {
    let mut reader = Reader {
        parser: Parser::new_from_str(text),
        text,
    };
    loop {
        match reader.next()? {
            (Event::StreamStart | Event::DocumentStart(_) | Event::Nothing, _) => {}
            (Event::StreamEnd, _) => return Ok(None),
            (event, span) => {
                let root = reader.value(event, span, 0)?;
                loop {
                    match reader.next()?.0 {
                        Event::DocumentEnd | Event::Nothing => {}
                        Event::StreamEnd => return Ok(Some(root)),
                        _ => {
                            return Err(EditError::Syntax("it has several documents".to_owned()));
                        }
                    }
                }
            }
        }
    }
}

impl<'a> Reader<'a> {
    fn next(&mut self) -> Result<(Event<'a>, Span), EditError> {
        match self.parser.next() {
            Some(Ok(event)) => Ok(event),
            Some(Err(error)) => Err(EditError::Syntax(error.to_string())),
            None => Ok((Event::StreamEnd, Span::default())),
        }
    }

    fn value(&mut self, event: Event<'a>, span: Span, depth: usize) -> Result<Located, EditError> {
        if depth > MAX_DEPTH {
            return Err(EditError::Syntax("it is nested too deeply".to_owned()));
        }
        let other = |node, last_line| {
            Ok(Located {
                value: LocatedValue::Other(node),
                last_line,
            })
        };
        match event {
            Event::Scalar(text, style, ..) => {
                let is_null = style == ScalarStyle::Plain
                    && matches!(text.as_ref(), "" | "~" | "null" | "Null" | "NULL");
                let node = if is_null {
                    ConfigValue::Word("null".to_owned())
                } else {
                    ConfigValue::Text(text.into_owned())
                };
                other(node, last_line(span))
            }
            Event::Alias(anchor) => other(ConfigValue::Text(format!("*{anchor}")), last_line(span)),
            Event::SequenceStart(..) => {
                let mut items = Vec::new();
                let mut last = last_line(span);
                loop {
                    match self.next()? {
                        (Event::SequenceEnd, end) => {
                            last = self.end_of(span, end, last);
                            return other(ConfigValue::List(items), last);
                        }
                        (event, span) => {
                            let item = self.value(event, span, depth + 1)?;
                            last = last.max(item.last_line);
                            items.push(item.node());
                        }
                    }
                }
            }
            Event::MappingStart(..) => self.map(span, depth),
            Event::Nothing
            | Event::StreamStart
            | Event::StreamEnd
            | Event::DocumentStart(_)
            | Event::DocumentEnd
            | Event::SequenceEnd
            | Event::MappingEnd => Err(EditError::Syntax("a value is missing".to_owned())),
        }
    }

    fn map(&mut self, start: Span, depth: usize) -> Result<Located, EditError> {
        let braces = self.starts_with(start, '{').then(|| start.start.index());
        let mut fields = Vec::new();
        let mut last = start.start.line();
        loop {
            let (event, span) = self.next()?;
            let key = match event {
                Event::MappingEnd => {
                    let last_line = self.end_of(start, span, last);
                    return Ok(Located {
                        value: LocatedValue::Map { fields, braces },
                        last_line,
                    });
                }
                Event::Scalar(text, ..) => text.into_owned(),
                _ => return Err(EditError::Syntax("a key is not a text".to_owned())),
            };
            let (event, of_value) = self.next()?;
            let value = self.value(event, of_value, depth + 1)?;
            last = last.max(value.last_line).max(last_line(span));
            fields.push((key, span.start.line(), span.start.col(), value));
        }
    }

    fn starts_with(&self, span: Span, character: char) -> bool {
        self.text.chars().nth(span.start.index()) == Some(character)
    }

    /// The last line of a collection. Only brackets have one of their own.
    fn end_of(&self, start: Span, end: Span, last: usize) -> usize {
        if self.starts_with(start, '{') || self.starts_with(start, '[') {
            last.max(last_line(end))
        } else {
            last
        }
    }
}

/// The last line with something of a scalar or a bracket.
fn last_line(span: Span) -> usize {
    let is_after_newline = span.end.col() == 0 && span.end.line() > span.start.line();
    span.end.line() - usize::from(is_after_newline)
}

impl Located {
    fn node(&self) -> ConfigValue {
        match &self.value {
            LocatedValue::Other(node) => node.clone(),
            LocatedValue::Map { fields, .. } => ConfigValue::Map(
                fields
                    .iter()
                    .map(|(key, _, _, value)| (key.clone(), value.node()))
                    .collect(),
            ),
        }
    }

    fn field(&self, key: &str) -> Option<&(String, usize, usize, Self)> {
        match &self.value {
            LocatedValue::Map { fields, .. } => fields.iter().find(|(name, ..)| name == key),
            LocatedValue::Other(_) => None,
        }
    }
}

/// The lines of an entry.
fn lines(name: &str, entry: &ConfigValue, indent: usize) -> Option<String> {
    let ConfigValue::Map(fields) = entry else {
        return None;
    };
    let margin = " ".repeat(indent);
    let mut lines = vec![format!("{margin}{name}:\n")];
    for (key, value) in fields {
        match value {
            ConfigValue::Map(inner) => {
                lines.push(format!("{margin}  {key}:\n"));
                for (key, value) in inner {
                    lines.push(format!("{margin}    {key}: {}\n", scalar(value)?));
                }
            }
            value => lines.push(format!("{margin}  {key}: {}\n", scalar(value)?)),
        }
    }
    Some(lines.concat())
}

/// A value on one line. Texts in double quotes are written as in JSON.
fn scalar(value: &ConfigValue) -> Option<String> {
    Some(match value {
        ConfigValue::Text(text) => serde_json::Value::from(text.as_str()).to_string(),
        ConfigValue::Word(word) => word.clone(),
        ConfigValue::List(items) => {
            let items: Option<Vec<String>> = items.iter().map(scalar).collect();
            format!("[{}]", items?.join(", "))
        }
        ConfigValue::Map(_) => return None,
    })
}

/// Splits a text after a line.
fn split_after(text: &str, line: usize) -> (&str, &str) {
    let end: usize = text.split_inclusive('\n').take(line).map(str::len).sum();
    text.split_at(end)
}

fn with_newline(text: &str) -> String {
    if text.is_empty() || text.ends_with('\n') {
        text.to_owned()
    } else {
        format!("{text}\n")
    }
}

pub(super) fn set(text: &str, spot: Spot<'_>, entry: &ConfigValue) -> Option<String> {
    let [key] = spot.keys else { return None };
    let root = read(text).ok()?;
    let Some((_, line, _, parent)) = root.as_ref().and_then(|root| root.field(key)) else {
        let added = lines(spot.name, entry, 2)?;
        return Some(format!("{}{key}:\n{added}", with_newline(text)));
    };
    match &parent.value {
        LocatedValue::Map {
            fields,
            braces: None,
        } => {
            let indent = fields.first().map_or(2, |(_, _, column, _)| *column);
            let added = lines(spot.name, entry, indent)?;
            // A known entry is replaced where it is.
            let (before, after) = match parent.field(spot.name) {
                Some((_, first, _, value)) => {
                    let (before, rest) = split_after(text, first - 1);
                    (before, split_after(rest, value.last_line + 1 - first).1)
                }
                None => split_after(text, *line),
            };
            Some(format!("{}{added}{after}", with_newline(before)))
        }
        LocatedValue::Map {
            fields,
            braces: Some(index),
        } if fields.is_empty() && parent.last_line == *line => {
            let at = text.char_indices().nth(*index)?.0;
            let end = at + text[at..].find('}')? + 1;
            let without = format!("{}{}", text[..at].trim_end(), &text[end..]);
            let (before, after) = split_after(&without, *line);
            let added = lines(spot.name, entry, 2)?;
            Some(format!("{}{added}{after}", with_newline(before)))
        }
        LocatedValue::Other(ConfigValue::Word(_)) => {
            // Without a value, or with a null on the line of the key.
            let (before, after) = split_after(text, *line);
            let (above, own) = split_after(before, line - 1);
            let colon = own.find(':')?;
            let (start, rest) = own.split_at(colon + 1);
            let rest = ["null", "Null", "NULL", "~"]
                .iter()
                .find_map(|null| rest.trim_start().strip_prefix(null))
                .unwrap_or(rest);
            let added = lines(spot.name, entry, 2)?;
            let own = with_newline(&format!("{start}{rest}"));
            Some(format!("{above}{own}{added}{after}"))
        }
        LocatedValue::Map { .. } | LocatedValue::Other(_) => None,
    }
}

pub(super) fn remove(text: &str, spot: Spot<'_>) -> Option<String> {
    let [key] = spot.keys else { return None };
    let root = read(text).ok()??;
    let (_, line, _, parent) = root.field(key)?;
    let LocatedValue::Map {
        fields,
        braces: None,
    } = &parent.value
    else {
        return None;
    };
    let (_, first, _, value) = parent.field(spot.name)?;
    let (before, rest) = split_after(text, first - 1);
    let after = split_after(rest, value.last_line + 1 - first).1;
    if fields.len() > 1 {
        return Some(format!("{before}{after}"));
    }
    // A key without a value is no map.
    let (above, own) = split_after(before, line - 1);
    let (own, comments) = split_after(own, 1);
    let (start, rest) = own.split_at(own.find(':')? + 1);
    Some(format!("{above}{start} {{}}{rest}{comments}{after}"))
}
