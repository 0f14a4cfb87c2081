//! Output: data to stdout, messages to stderr, progress only to a terminal.
//!
//! Text may contain strings that others chose. This module escapes it (`sanitize.rs`), so that no
//! caller can forget to.

use std::{
    io::{self, IsTerminal, Write},
    time::Duration,
};

use comfy_table::{ColumnConstraint, Width};
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

/// Blanks after a column.
const COLUMN_GAP: u16 = 2;
/// The last digits of an id that a list on a terminal shows: the first ones are time.
const SHORT_ID: usize = 8;

/// The end of an id.
pub fn short_id(id: &str) -> &str {
    id.len()
        .checked_sub(SHORT_ID)
        .and_then(|start| id.get(start..))
        .unwrap_or(id)
}

/// How tables are printed: for a person at a terminal, or whole.
#[derive(Clone, Copy, Debug)]
pub struct TableStyle {
    /// The columns of the terminal that rows have to fit.
    width: Option<u16>,
}

impl TableStyle {
    /// Fits the terminal. Whole if standard output is none, so that programs get stable columns.
    pub fn new(wide: bool) -> Self {
        let is_terminal = io::stdout().is_terminal();
        let width = || match rustix::termios::tcgetwinsize(io::stdout()) {
            Ok(size) if size.ws_col > 0 => size.ws_col,
            _ => 80,
        };
        Self {
            width: (is_terminal && !wide).then(width),
        }
    }

    /// Whole rows, whatever their place: for names from a sandbox, whose ends a reader must see.
    pub const WHOLE: Self = Self { width: None };

    /// An id, as far as the style shows it.
    pub fn id(self, id: &impl ToString) -> String {
        let id = id.to_string();
        match self.width {
            Some(_) => short_id(&id).to_owned(),
            None => id,
        }
    }

    /// A time: its age on a terminal, or else the time itself.
    pub fn time(self, at: time::OffsetDateTime) -> String {
        match self.width {
            Some(_) => format!(
                "{} ago",
                span((time::OffsetDateTime::now_utc() - at).whole_seconds())
            ),
            None => at
                .format(&time::format_description::well_known::Rfc3339)
                .unwrap_or_default(),
        }
    }

    fn row<const N: usize>(self, cells: [String; N]) -> comfy_table::Row {
        let mut row = comfy_table::Row::from(cells);
        if self.width.is_some() {
            // Cells are cut instead of wrapped.
            row.max_height(1);
        }
        row
    }

    /// Rows under a header, without borders.
    fn render<const N: usize>(
        self,
        header: [&str; N],
        rows: impl IntoIterator<Item = [String; N]>,
    ) -> String {
        let mut table = comfy_table::Table::new();
        table.load_style(comfy_table::presets::NOTHING);
        if self.width.is_some() {
            table.set_content_arrangement(comfy_table::ContentArrangement::Dynamic);
        }
        table.set_header(self.row(header.map(ToOwned::to_owned)));
        for row in rows {
            table.add_row(self.row(row.map(|cell| sanitize::line(&cell))));
        }
        let contents = table.column_max_content_widths();
        let widths = self.width.map(|width| fitted(&contents, width));
        for index in 0..N {
            if let Some(column) = table.column_mut(index) {
                column.set_padding((0, COLUMN_GAP));
                if let Some(width) = widths.as_ref().and_then(|widths| widths.get(index)) {
                    column.set_constraint(ColumnConstraint::Absolute(Width::Fixed(
                        width + COLUMN_GAP,
                    )));
                }
            }
        }
        table.trim_fmt()
    }
}

/// The widths of columns that fit a terminal together. Long columns give way first, the longest
/// most, so that ids and states stay whole while a command or a reference is cut.
fn fitted(contents: &[u16], width: u16) -> Vec<u16> {
    const LONG: u16 = 8;
    let mut widths = contents.to_vec();
    // The gap after the last column is not printed.
    let available = u32::from(width) + u32::from(COLUMN_GAP);
    for (is_shrunk, least) in [(LONG + 1, 4), (0, 1)] {
        loop {
            let total: u32 = widths
                .iter()
                .map(|width| u32::from(*width) + u32::from(COLUMN_GAP))
                .sum();
            let longest = widths
                .iter_mut()
                .zip(contents)
                .filter(|(width, content)| **content >= is_shrunk && **width > least)
                .map(|(width, _)| width)
                .max();
            match longest {
                Some(longest) if total > available => *longest -= 1,
                _ => break,
            }
        }
    }
    widths
}

/// Prints rows under a header, without borders.
pub fn table<const N: usize>(
    style: TableStyle,
    header: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
) -> io::Result<()> {
    line(&style.render(header, rows))
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

/// Whether somebody watches progress.
pub fn shows_progress() -> bool {
    io::stderr().is_terminal()
}

/// A spinner or a bar on stderr, if that is a terminal. Disappears when dropped.
#[derive(Debug)]
pub struct Progress(indicatif::ProgressBar);

impl Progress {
    /// A bar up to a total of bytes, or a spinner if the total is unknown.
    pub fn of_total(action: &str, total: Option<u64>) -> Self {
        let (Some(total), true) = (total, shows_progress()) else {
            return Self::start(action);
        };
        let style = indicatif::ProgressStyle::with_template(
            "{msg} [{bar:30}] {bytes} of {total_bytes}, {eta} left",
        )
        .unwrap_or_else(|_| indicatif::ProgressStyle::default_bar());
        let bar = indicatif::ProgressBar::new(total)
            .with_style(style.progress_chars("=> "))
            .with_message(action.to_owned());
        bar.enable_steady_tick(Duration::from_millis(120));
        Self(bar)
    }

    pub fn start(message: impl Into<String>) -> Self {
        if !shows_progress() {
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
        match self.0.length() {
            // The total is an estimate.
            Some(total) => self.0.set_position(bytes.min(total)),
            None => self.0.set_message(format!("{action} {}", size(bytes))),
        }
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
    fn a_table_fits_its_terminal_and_is_whole_elsewhere() {
        let rows = || {
            (0..3).map(|number| {
                [
                    format!("0189000{number}"),
                    "running".to_owned(),
                    "a long command ".repeat(20),
                ]
            })
        };
        let header = ["SESSION", "STATE", "COMMAND"];
        for width in [40, 80, 200] {
            let text = TableStyle { width: Some(width) }.render(header, rows());
            assert_eq!(text.lines().count(), 4, "{text}");
            assert!(
                text.lines()
                    .all(|line| line.chars().count() <= usize::from(width)),
                "{text}"
            );
            assert!(text.contains("01890002") && text.contains('…'), "{text}");
        }
        assert_eq!(fitted(&[8, 13, 7, 3, 26], 50), [8, 12, 7, 3, 12]);
        assert_eq!(fitted(&[8, 13, 7, 3, 26], 40), [8, 7, 7, 3, 7]);
        assert_eq!(fitted(&[8, 13, 7, 3, 26], 10), [1, 1, 1, 1, 1]);
        let whole = TableStyle { width: None }.render(header, rows());
        assert!(
            whole.contains(&"a long command ".repeat(19)) && whole.lines().count() == 4,
            "{whole}"
        );
    }

    #[test]
    fn an_id_is_short_on_a_terminal_only() {
        let id = "01890000-0000-7000-8000-0000deadbeef".to_owned();
        assert_eq!(TableStyle { width: Some(80) }.id(&id), "deadbeef");
        assert_eq!(TableStyle { width: None }.id(&id), id);
        assert_eq!(short_id("abc"), "abc");
    }

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
