//! The mode of the local terminal. Restored when dropped, also by a panic.

use std::io::{self, IsTerminal as _, stdin};

use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};

/// A changed mode; holds the one to restore.
#[derive(Debug)]
pub struct TerminalMode(Termios);

impl TerminalMode {
    /// `None` if stdin is not a terminal.
    pub fn change(change: impl FnOnce(&mut Termios)) -> io::Result<Option<Self>> {
        if !stdin().is_terminal() {
            return Ok(None);
        }
        let before = tcgetattr(stdin())?;
        let mut changed = before.clone();
        change(&mut changed);
        tcsetattr(stdin(), OptionalActions::Drain, &changed)?;
        Ok(Some(Self(before)))
    }
}

impl Drop for TerminalMode {
    fn drop(&mut self) {
        // The terminal may be gone.
        tcsetattr(stdin(), OptionalActions::Flush, &self.0).ok();
    }
}
