//! An incremental scanner of one JSON document, which keeps a few numbers and no text.

use crate::{limits::MAX_ANSWER_DEPTH, scan::AnswerScan, usage::Usage};

/// What a document says in its outermost fields, and in those of `usage`. The last of duplicate
/// fields counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) is_done: bool,
    pub(super) has_error: bool,
    prompt_eval_count: Option<u64>,
    eval_count: Option<u64>,
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    /// Whether `remote_host` and `remote_model` name something.
    is_remote: [bool; 2],
}

impl Found {
    pub(super) fn is_external(&self) -> bool {
        self.is_remote.contains(&true)
    }

    pub(super) fn usage(&self) -> Option<Usage> {
        let of = |prompt: Option<u64>, completion: Option<u64>| Usage {
            prompt_tokens: prompt.unwrap_or(0),
            completion_tokens: completion.unwrap_or(0),
        };
        if self.prompt_tokens.is_some() || self.completion_tokens.is_some() {
            return Some(of(self.prompt_tokens, self.completion_tokens));
        }
        // Ollama leaves out counts that are zero.
        let is_counted = self.is_done || self.prompt_eval_count.or(self.eval_count).is_some();
        is_counted.then(|| of(self.prompt_eval_count, self.eval_count))
    }
}

/// A field that is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    Other,
    Done,
    Error,
    RemoteHost,
    RemoteModel,
    PromptEvalCount,
    EvalCount,
    Usage,
    PromptTokens,
    CompletionTokens,
}

impl Field {
    fn outermost(name: &[u8]) -> Self {
        match name {
            b"done" => Self::Done,
            b"error" => Self::Error,
            b"remote_host" => Self::RemoteHost,
            b"remote_model" => Self::RemoteModel,
            b"prompt_eval_count" => Self::PromptEvalCount,
            b"eval_count" => Self::EvalCount,
            b"usage" => Self::Usage,
            _ => Self::Other,
        }
    }

    fn of_usage(name: &[u8]) -> Self {
        match name {
            b"prompt_tokens" => Self::PromptTokens,
            b"completion_tokens" => Self::CompletionTokens,
            _ => Self::Other,
        }
    }
}

/// The name of a field, as far as it can be one of those that are read.
#[derive(Debug)]
struct Name {
    bytes: [u8; Self::LONGEST],
    length: usize,
}

impl Name {
    const LONGEST: usize = "prompt_eval_count".len();

    fn push(&mut self, byte: u8) {
        if let Some(slot) = self.bytes.get_mut(self.length) {
            *slot = byte;
        }
        self.length = self.length.saturating_add(1);
    }

    fn get(&self) -> &[u8] {
        self.bytes.get(..self.length).unwrap_or_default()
    }
}

#[derive(Clone, Copy, Debug)]
enum State {
    Value,
    /// After `[`.
    ValueOrEnd,
    /// After `{`.
    NameOrEnd,
    /// After a comma in an object.
    Name,
    Colon,
    CommaOrEnd,
    Text {
        is_name: bool,
        escape: Escape,
    },
    Number(NumberPart),
    Literal {
        rest: &'static [u8],
    },
    /// After the document.
    End,
    Broken,
}

#[derive(Clone, Copy, Debug)]
enum Escape {
    None,
    /// After a backslash.
    Start,
    /// So many digits are read, with this value.
    Hexadecimal(u8, u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NumberPart {
    Minus,
    Zero,
    Whole,
    Point,
    Fraction,
    ExponentStart,
    ExponentSign,
    Exponent,
}

impl NumberPart {
    /// The part after one more byte; nothing if the number can't go on so.
    const fn next(self, byte: u8) -> Option<Self> {
        Some(match (self, byte) {
            (Self::Minus, b'0') => Self::Zero,
            (Self::Minus | Self::Whole, b'0'..=b'9') => Self::Whole,
            (Self::Zero | Self::Whole, b'.') => Self::Point,
            (Self::Point | Self::Fraction, b'0'..=b'9') => Self::Fraction,
            (Self::Zero | Self::Whole | Self::Fraction, b'e' | b'E') => Self::ExponentStart,
            (Self::ExponentStart, b'+' | b'-') => Self::ExponentSign,
            (Self::ExponentStart | Self::ExponentSign | Self::Exponent, b'0'..=b'9') => {
                Self::Exponent
            }
            _ => return None,
        })
    }

    const fn is_complete(self) -> bool {
        matches!(
            self,
            Self::Zero | Self::Whole | Self::Fraction | Self::Exponent
        )
    }
}

#[derive(Debug)]
pub(super) struct JsonScanner {
    state: State,
    depth: u32,
    /// A bit for each level: whether it is an object. The lowest is the innermost.
    objects: u128,
    /// Whether the second level is the value of `usage`.
    is_in_usage: bool,
    name: Name,
    /// The field whose value is read, if it is of the document itself or of its usage.
    field: Field,
    /// The whole number that is read, if it is one.
    count: Option<u64>,
    found: Found,
    length: u64,
    longest: u64,
}

impl JsonScanner {
    pub(super) const fn new(longest: u64) -> Self {
        Self {
            state: State::Value,
            depth: 0,
            objects: 0,
            is_in_usage: false,
            name: Name {
                bytes: [0; Name::LONGEST],
                length: 0,
            },
            field: Field::Other,
            count: None,
            found: Found {
                is_done: false,
                has_error: false,
                prompt_eval_count: None,
                eval_count: None,
                prompt_tokens: None,
                completion_tokens: None,
                is_remote: [false; 2],
            },
            length: 0,
            longest,
        }
    }

    pub(super) fn push_all(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.push(*byte);
        }
    }

    pub(super) fn push(&mut self, byte: u8) {
        self.length = self.length.saturating_add(1);
        if self.length > self.longest {
            self.state = State::Broken;
        }
        self.state = self.next(byte).unwrap_or(State::Broken);
    }

    pub(super) const fn is_overlong(&self) -> bool {
        self.length > self.longest
    }

    /// Whether only white space came so far.
    pub(super) const fn is_blank(&self) -> bool {
        matches!(self.state, State::Value) && self.depth == 0
    }

    /// Ends the document and begins another. What was found is added to the scan.
    pub(super) fn end(&mut self, scan: &mut AnswerScan) -> Option<Found> {
        if let (State::Number(part), 0) = (self.state, self.depth)
            && part.is_complete()
        {
            self.state = State::End;
        }
        let is_complete = matches!(self.state, State::End);
        let found = self.found;
        scan.is_overlong |= self.is_overlong();
        scan.is_malformed |= !is_complete && !self.is_overlong();
        self.reset();
        is_complete.then(|| {
            scan.add(&found);
            found
        })
    }

    /// Begins another document.
    pub(super) const fn reset(&mut self) {
        *self = Self::new(self.longest);
    }

    fn next(&mut self, byte: u8) -> Option<State> {
        match self.state {
            State::Text { is_name, escape } => self.text(byte, is_name, escape),
            State::Number(part) => match part.next(byte) {
                Some(part) => {
                    self.digit(byte);
                    Some(State::Number(part))
                }
                None if part.is_complete() => {
                    self.number();
                    self.state = self.after_value();
                    self.next(byte)
                }
                None => None,
            },
            State::Literal { rest } => match rest.split_first() {
                Some((expected, [])) if *expected == byte => Some(self.after_value()),
                Some((expected, rest)) if *expected == byte => Some(State::Literal { rest }),
                _ => None,
            },
            State::Broken => None,
            state if matches!(byte, b' ' | b'\t' | b'\n' | b'\r') => Some(state),
            State::ValueOrEnd if byte == b']' => Some(self.close()),
            State::Value | State::ValueOrEnd => self.value(byte),
            State::NameOrEnd if byte == b'}' => Some(self.close()),
            State::NameOrEnd | State::Name => (byte == b'"').then(|| {
                self.name.length = 0;
                State::Text {
                    is_name: true,
                    escape: Escape::None,
                }
            }),
            State::Colon => (byte == b':').then_some(State::Value),
            State::CommaOrEnd => match (byte, self.objects & 1 == 1) {
                (b',', true) => Some(State::Name),
                (b',', false) => Some(State::Value),
                (b'}', true) | (b']', false) => Some(self.close()),
                _ => None,
            },
            State::End => None,
        }
    }

    /// Begins a value.
    fn value(&mut self, byte: u8) -> Option<State> {
        let field = self.field_of_value();
        self.begin(field, byte);
        self.field = field;
        match byte {
            b'{' => self.open(true),
            b'[' => self.open(false),
            b'"' => Some(State::Text {
                is_name: false,
                escape: Escape::None,
            }),
            b't' => Some(State::Literal { rest: b"rue" }),
            b'f' => Some(State::Literal { rest: b"alse" }),
            b'n' => Some(State::Literal { rest: b"ull" }),
            b'-' => {
                self.count = None;
                Some(State::Number(NumberPart::Minus))
            }
            b'0'..=b'9' => {
                self.count = Some(u64::from(byte - b'0'));
                Some(State::Number(if byte == b'0' {
                    NumberPart::Zero
                } else {
                    NumberPart::Whole
                }))
            }
            _ => None,
        }
    }

    fn field_of_value(&self) -> Field {
        match (self.depth, self.objects & 1 == 1) {
            (1, true) => Field::outermost(self.name.get()),
            (2, true) if self.is_in_usage => Field::of_usage(self.name.get()),
            _ => Field::Other,
        }
    }

    /// Forgets the earlier value of a field, and takes what the first byte of the new one says.
    fn begin(&mut self, field: Field, byte: u8) {
        let found = &mut self.found;
        match field {
            Field::Other => {}
            Field::Done => found.is_done = byte == b't',
            Field::Error => found.has_error = byte != b'n',
            Field::RemoteHost => found.is_remote[0] = false,
            Field::RemoteModel => found.is_remote[1] = false,
            Field::PromptEvalCount => found.prompt_eval_count = None,
            Field::EvalCount => found.eval_count = None,
            Field::Usage => {
                found.prompt_tokens = None;
                found.completion_tokens = None;
            }
            Field::PromptTokens => found.prompt_tokens = None,
            Field::CompletionTokens => found.completion_tokens = None,
        }
    }

    fn open(&mut self, is_object: bool) -> Option<State> {
        if self.depth == MAX_ANSWER_DEPTH {
            return None;
        }
        if self.depth == 1 {
            self.is_in_usage = is_object && self.field == Field::Usage;
        }
        self.depth += 1;
        self.objects = self.objects << 1 | u128::from(is_object);
        Some(if is_object {
            State::NameOrEnd
        } else {
            State::ValueOrEnd
        })
    }

    fn close(&mut self) -> State {
        self.depth = self.depth.saturating_sub(1);
        self.objects >>= 1;
        self.after_value()
    }

    fn after_value(&self) -> State {
        if self.depth == 0 {
            State::End
        } else {
            State::CommaOrEnd
        }
    }

    fn digit(&mut self, byte: u8) {
        self.count = match (self.count, byte) {
            (Some(count), b'0'..=b'9') => count
                .checked_mul(10)
                .and_then(|count| count.checked_add(u64::from(byte - b'0'))),
            _ => None,
        };
    }

    fn number(&mut self) {
        let found = &mut self.found;
        match self.field {
            Field::PromptEvalCount => found.prompt_eval_count = self.count,
            Field::EvalCount => found.eval_count = self.count,
            Field::PromptTokens => found.prompt_tokens = self.count,
            Field::CompletionTokens => found.completion_tokens = self.count,
            _ => {}
        }
    }

    fn text(&mut self, byte: u8, is_name: bool, escape: Escape) -> Option<State> {
        let escape = match (escape, byte) {
            (Escape::None, b'"') if is_name => return Some(State::Colon),
            (Escape::None, b'"') => return Some(self.after_value()),
            (Escape::None, b'\\') => Escape::Start,
            (Escape::None, 0..=0x1f) => return None,
            (Escape::None, _) => {
                self.character(byte, is_name);
                Escape::None
            }
            (Escape::Start, b'u') => Escape::Hexadecimal(0, 0),
            (Escape::Start, b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => {
                // No name that is read has a character with a short escape.
                self.character(b'\\', is_name);
                Escape::None
            }
            (Escape::Start, _) => return None,
            (Escape::Hexadecimal(count, value), _) => {
                let digit = char::from(byte).to_digit(16)?;
                let value = value << 4 | digit;
                if count < 3 {
                    Escape::Hexadecimal(count + 1, value)
                } else {
                    let ascii = u8::try_from(value).ok().filter(u8::is_ascii);
                    self.character(ascii.unwrap_or(b'\\'), is_name);
                    Escape::None
                }
            }
        };
        Some(State::Text { is_name, escape })
    }

    /// A character of a text. Only names and the first one of two fields matter.
    fn character(&mut self, byte: u8, is_name: bool) {
        match self.field {
            _ if is_name => self.name.push(byte),
            Field::RemoteHost => self.found.is_remote[0] = true,
            Field::RemoteModel => self.found.is_remote[1] = true,
            _ => {}
        }
    }
}
