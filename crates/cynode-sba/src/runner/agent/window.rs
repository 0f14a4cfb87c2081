//! How much a model reads at once: its window.
//!
//! Invariants: prompt and answer fit into a window that is known, as far as bytes tell tokens; a
//! job whose context leaves no room for turns ends with the reason, because its context is never
//! shortened.

/// Tokens of a prompt, unless a smaller window is known or a larger one is configured. Servers cut a
/// longer prompt at its beginning, where the context is.
const PROMPT_TOKENS: u64 = 32_768;
/// Tokens of an answer, unless the window is small.
const ANSWER_TOKENS: u64 = 8_192;
/// Code has fewer bytes a token than prose.
const BYTES_PER_TOKEN: u64 = 3;
/// What turns may take beside a context that fills the window.
const MIN_HISTORY_BYTES: usize = 24 * 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Window {
    prompt_tokens: u64,
    answer_tokens: u64,
    /// Of both, if it is known.
    total: Option<u64>,
}

impl Window {
    /// The window that the node's operator states, or else the smallest that the server reports.
    pub(super) fn new(configured: Option<u64>, reported: Option<u64>) -> Self {
        let Some(total) = configured.or(reported) else {
            return Self {
                prompt_tokens: PROMPT_TOKENS,
                answer_tokens: ANSWER_TOKENS,
                total: None,
            };
        };
        let answer_tokens = ANSWER_TOKENS.min(total / 4);
        // What servers report is the most that a model can do, not what they make room for.
        let most = configured.unwrap_or(PROMPT_TOKENS);
        Self {
            prompt_tokens: (total - answer_tokens).min(most),
            answer_tokens,
            total: Some(total),
        }
    }

    pub(super) const fn answer_tokens(self) -> u64 {
        self.answer_tokens
    }

    pub(super) fn prompt_bytes(self) -> usize {
        let bytes = self.prompt_tokens.saturating_mul(BYTES_PER_TOKEN);
        usize::try_from(bytes).unwrap_or(usize::MAX)
    }

    /// What turns may take in any case.
    pub(super) fn min_history_bytes(self) -> usize {
        match self.total {
            Some(_) => MIN_HISTORY_BYTES.min(self.prompt_bytes() / 4),
            None => MIN_HISTORY_BYTES,
        }
    }

    /// Fails if a prompt, of which these bytes are never shortened, has no room for turns.
    pub(super) fn check(self, fixed_bytes: usize) -> Result<(), String> {
        let Some(total) = self.total else {
            return Ok(());
        };
        if fixed_bytes.saturating_add(self.min_history_bytes()) <= self.prompt_bytes() {
            return Ok(());
        }
        Err(format!(
            "the context of the job and its tools take about {} tokens, and the model reads {total} \
             at once, of which {} are for its answer and {} at least for the conversation; shorten \
             the context, or serve the model with a larger window (worker.inference.context_tokens)",
            fixed_bytes as u64 / BYTES_PER_TOKEN,
            self.answer_tokens,
            self.min_history_bytes() as u64 / BYTES_PER_TOKEN,
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompt_and_answer_share_a_window_that_is_known() {
        let unknown = Window::new(None, None);
        assert_eq!(
            (unknown.prompt_tokens, unknown.answer_tokens()),
            (PROMPT_TOKENS, ANSWER_TOKENS)
        );
        let small = Window::new(None, Some(8_192));
        assert_eq!((small.prompt_tokens, small.answer_tokens()), (6_144, 2_048));
        let large = Window::new(None, Some(131_072));
        assert_eq!(
            (large.prompt_tokens, large.answer_tokens()),
            (32_768, 8_192)
        );
        let stated = Window::new(Some(131_072), Some(8_192));
        assert_eq!(stated.prompt_tokens, 122_880);
        assert_eq!(Window::new(Some(4_096), Some(131_072)).prompt_tokens, 3_072);
    }

    #[test]
    fn a_context_that_leaves_no_room_is_refused_with_the_numbers() {
        let small = Window::new(None, Some(8_192));
        let most = small.prompt_bytes() - small.min_history_bytes();
        assert_eq!(small.check(most), Ok(()));
        let reason = small.check(most + 1).expect_err("too long");
        assert!(
            reason.contains("reads 8192 at once") && reason.contains("2048 are for its answer"),
            "{reason}"
        );
        assert!(Window::new(None, None).check(4 << 20).is_ok());
        assert!(Window::new(Some(0), None).check(1).is_err());
    }
}
