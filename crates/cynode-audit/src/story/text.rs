//! Formats text so that it is safe and short enough to show.

use std::fmt::Write as _;

use time::{OffsetDateTime, UtcOffset};

use super::Story;

/// The longest description of one call, in characters.
const MAX_CHARACTERS: usize = 500;

/// Escapes control characters and characters that hide or reorder text, so that a text from a
/// sandbox stays on its line.
#[must_use]
pub fn shown(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\0'..='\x1f' | '\x7f' => {
                escape(format_args!("\\x{:02x}", u32::from(character)), &mut out);
            }
            _ if is_hidden(character) => {
                escape(format_args!("\\u{{{:x}}}", u32::from(character)), &mut out);
            }
            _ => out.push(character),
        }
    }
    out
}

/// Whether a character is invisible or changes how its neighbours appear: C1 controls, which a
/// terminal interprets as ESC and a letter, and Unicode's default-ignorable characters,
/// bidirectional controls and line separators.
#[must_use]
pub const fn is_hidden(character: char) -> bool {
    matches!(
        character,
        '\u{80}'..='\u{9f}'
            | '\u{ad}'
            | '\u{34f}'
            | '\u{61c}'
            | '\u{115f}'..='\u{1160}'
            | '\u{17b4}'..='\u{17b5}'
            | '\u{180b}'..='\u{180f}'
            | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}'
            | '\u{3164}'
            | '\u{fe00}'..='\u{fe0f}'
            | '\u{feff}'
            | '\u{ffa0}'
            | '\u{fff0}'..='\u{fffb}'
            | '\u{13430}'..='\u{1343f}'
            | '\u{1bca0}'..='\u{1bca3}'
            | '\u{1d173}'..='\u{1d17a}'
            | '\u{e0000}'..='\u{e0fff}'
    )
}

fn escape(arguments: std::fmt::Arguments<'_>, out: &mut String) {
    out.write_fmt(arguments)
        .expect("writing to a string does not fail");
}

/// Quotes a word for a shell, with unsafe characters escaped.
pub(crate) fn quoted(word: &str) -> String {
    let is_plain =
        |character: char| character.is_alphanumeric() || "-_./:=@%+,~".contains(character);
    if !word.is_empty() && word.chars().all(is_plain) {
        return shown(word);
    }
    format!("'{}'", shown(word).replace('\'', "'\\''"))
}

pub(super) fn truncate(text: &str) -> String {
    match text.char_indices().nth(MAX_CHARACTERS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// `1.2 s`.
pub(super) fn duration(milliseconds: u64) -> String {
    match milliseconds {
        0..1_000 => format!("{milliseconds} ms"),
        1_000..60_000 => format!("{}.{} s", milliseconds / 1_000, milliseconds % 1_000 / 100),
        60_000..3_600_000 => format!(
            "{} min {} s",
            milliseconds / 60_000,
            milliseconds % 60_000 / 1_000
        ),
        _ => format!(
            "{} h {} min",
            milliseconds / 3_600_000,
            milliseconds % 3_600_000 / 60_000
        ),
    }
}

/// `4.1 kB`.
pub(super) fn size(bytes: u64) -> String {
    let (unit, name) = match bytes {
        0..1_000 => return format!("{bytes} B"),
        1_000..1_000_000 => (1_000, "kB"),
        1_000_000..1_000_000_000 => (1_000_000, "MB"),
        _ => (1_000_000_000, "GB"),
    };
    format!("{}.{} {name}", bytes / unit, bytes % unit / (unit / 10))
}

pub(super) fn plural(count: u64, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

/// `2026-01-02 03:04:05.678`, in UTC.
fn utc_timestamp(at: OffsetDateTime) -> String {
    let at = at.to_offset(UtcOffset::UTC);
    let (date, time) = (at.date(), at.time());
    format!(
        "{date} {:02}:{:02}:{:02}.{:03}",
        time.hour(),
        time.minute(),
        time.second(),
        time.millisecond()
    )
}

impl Story {
    /// The lines, an empty line, and the summary.
    #[must_use]
    pub fn to_text(&self) -> String {
        let width = self
            .lines
            .iter()
            .map(|line| line.who.chars().count())
            .max()
            .unwrap_or(0);
        let mut text = String::new();
        for line in &self.lines {
            escape(
                format_args!(
                    "{}  {:<width$}  {}\n",
                    utc_timestamp(line.at),
                    line.who,
                    line.what
                ),
                &mut text,
            );
        }
        if !text.is_empty() {
            text.push('\n');
        }
        text.push_str(&self.summary_text());
        text
    }

    fn summary_text(&self) -> String {
        let summary = &self.summary;
        let (Some(from), Some(to)) = (summary.from, summary.to) else {
            return "Nothing is recorded.\n".to_owned();
        };
        let took = u64::try_from((to - from).whole_milliseconds()).unwrap_or(0);
        let by = if summary.actors.is_empty() {
            "system".to_owned()
        } else {
            summary.actors.join(", ")
        };
        let mut text = format!(
            "From {} to {} UTC ({}), by {by}\n",
            utc_timestamp(from),
            utc_timestamp(to),
            duration(took)
        );
        let mut facts = vec![plural(summary.commands.count, "command", "commands")];
        let mut fact = |count: u64, one: &str, many: &str| {
            facts.extend((count > 0).then(|| plural(count, one, many)));
        };
        fact(summary.commands.failed, "failed", "failed");
        fact(summary.commands.timed_out, "timed out", "timed out");
        fact(summary.denials, "denial", "denials");
        fact(
            summary.open,
            "call without an outcome",
            "calls without an outcome",
        );
        escape(format_args!("{}\n", facts.join(", ")), &mut text);
        write_names("files", &summary.files, summary.more_files, &mut text);
        write_names(
            "artifacts",
            &summary.artifacts,
            summary.more_artifacts,
            &mut text,
        );
        text
    }
}

fn write_names(title: &str, listed: &[String], more: u64, text: &mut String) {
    if listed.is_empty() {
        return;
    }
    escape(format_args!("{title}:\n"), text);
    for name in listed {
        escape(format_args!("  {name}\n"), text);
    }
    if more > 0 {
        escape(format_args!("  and {more} more\n"), text);
    }
}
