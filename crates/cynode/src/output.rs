//! Output: data to stdout, messages to stderr, progress only to a terminal.
//!
//! Text may contain strings that others chose. This module escapes it (`sanitize.rs`), so that no
//! caller can forget to.

use std::{
    io::{self, IsTerminal, Write},
    time::Duration,
};

use serde::Serialize;

use crate::sanitize;

/// Prints lines of data.
pub fn line(text: &str) -> io::Result<()> {
    verbatim(&sanitize::lines(text))
}

/// Prints a line that starts with a coloured word.
pub fn line_with_colored_start(word: &str, colour: Colour, rest: &str) -> io::Result<()> {
    verbatim(&format!(
        "{}{}",
        paint(&sanitize::line(word), colour),
        sanitize::lines(rest)
    ))
}

/// Prints a line that ends with a coloured word.
pub fn line_with_colored_end(start: &str, word: &str, colour: Colour) -> io::Result<()> {
    verbatim(&format!(
        "{}{}",
        sanitize::lines(start),
        paint(&sanitize::line(word), colour)
    ))
}

/// Prints text without escaping it. Not for a terminal.
pub fn verbatim(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{text}")?;
    stdout.flush()
}

/// Prints a JSON document.
pub fn json(value: &(impl Serialize + ?Sized)) -> io::Result<()> {
    verbatim(&sanitize::json(serde_json::to_string_pretty(value)?))
}

/// Prints a JSON document on one line.
pub fn json_line(value: &(impl Serialize + ?Sized)) -> io::Result<()> {
    verbatim(&sanitize::json(serde_json::to_string(value)?))
}

/// Prints rows under a header, without borders.
pub fn table<const N: usize>(
    header: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
) -> io::Result<()> {
    let mut table = comfy_table::Table::new();
    table
        .load_style(comfy_table::presets::NOTHING)
        .set_header(header);
    for row in rows {
        table.add_row(row.map(|cell| sanitize::line(&cell)));
    }
    for index in 0..N {
        if let Some(column) = table.column_mut(index) {
            column.set_padding((0, 2));
        }
    }
    line(&table.trim_fmt())
}

/// Prints a message to stderr. Ignores a closed stderr.
pub fn message(text: &str) {
    drop(writeln!(io::stderr().lock(), "{}", sanitize::lines(text)));
}

#[derive(Clone, Copy, Debug)]
pub enum Colour {
    Green,
    Yellow,
    Red,
}

/// Colours text if stdout is a terminal and `NO_COLOR` is not set.
fn paint(text: &str, colour: Colour) -> String {
    if !io::stdout().is_terminal()
        || std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
    {
        return text.to_owned();
    }
    let number = match colour {
        Colour::Red => 31,
        Colour::Green => 32,
        Colour::Yellow => 33,
    };
    format!("\x1b[{number}m{text}\x1b[0m")
}

/// A spinner on stderr, if that is a terminal. Disappears when dropped.
#[derive(Debug)]
pub struct Progress(indicatif::ProgressBar);

impl Progress {
    pub fn start(message: impl Into<String>) -> Self {
        if !io::stderr().is_terminal() {
            return Self(indicatif::ProgressBar::hidden());
        }
        let bar = indicatif::ProgressBar::new_spinner().with_message(message.into());
        bar.enable_steady_tick(Duration::from_millis(120));
        Self(bar)
    }

    pub fn set_message(&self, message: impl Into<String>) {
        self.0.set_message(sanitize::line(&message.into()));
    }

    pub fn set_bytes(&self, action: &str, bytes: u64) {
        self.0.set_message(format!("{action} {}", size(bytes)));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// `1.5 GiB`.
pub fn size(bytes: u64) -> String {
    let mut unit = 0;
    let mut whole = bytes;
    let mut tenths = 0;
    while whole >= 1024 {
        tenths = whole % 1024 * 10 / 1024;
        whole /= 1024;
        unit += 1;
    }
    let name = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"][unit];
    if tenths == 0 {
        format!("{whole} {name}")
    } else {
        format!("{whole}.{tenths} {name}")
    }
}

/// A duration in its largest unit: `3h`.
pub fn span(seconds: i64) -> String {
    match seconds.max(0) {
        s @ 0..=119 => format!("{s}s"),
        s @ 120..=7199 => format!("{}m", s / 60),
        s @ 7200..=172_799 => format!("{}h", s / 3600),
        s => format!("{}d", s / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_spans_are_short() {
        assert_eq!(
            [
                size(0),
                size(1023),
                size(1536),
                size(10 << 30),
                size(u64::MAX)
            ],
            ["0 B", "1023 B", "1.5 KiB", "10 GiB", "15.9 EiB"]
        );
        assert_eq!(
            [span(-5), span(90), span(3600), span(86_400), span(200_000)],
            ["0s", "90s", "60m", "24h", "2d"]
        );
    }
}
