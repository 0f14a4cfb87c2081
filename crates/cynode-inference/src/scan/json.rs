//! An incremental scanner of one JSON document, which keeps a few numbers and no text.

use crate::{limits::MAX_ANSWER_DEPTH, scan::AnswerScan, usage::Usage};

/// The values of the fields that the scanner reads: those of the document itself and of its `usage`.
/// Of duplicate fields, the last counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ScannedFields {
    pub(super) is_done: bool,
    pub(super) has_error: bool,
    prompt_eval_count: Option<u64>,
    eval_count: Option<u64>,
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    /// Whether `remote_host` and `remote_model` are non-empty strings.
    is_remote: [bool; 2],
}

impl ScannedFields {
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

/// A field whose value is of interest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ScannedField {
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

impl ScannedField {
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

/// The name of a field. Keeps only as many bytes as the longest name of interest has.
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
    /// The number of hexadecimal digits so far, and their value.
    Hexadecimal(u8, u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NumberPart {
    Minus,
    Zero,
    Integer,
    Point,
    Fraction,
    ExponentStart,
    ExponentSign,
    Exponent,
}

impl NumberPart {
    /// The part after another byte; `None` if the byte can't continue the number.
    const fn next(self, byte: u8) -> Option<Self> {
        Some(match (self, byte) {
            (Self::Minus, b'0') => Self::Zero,
            (Self::Minus | Self::Integer, b'0'..=b'9') => Self::Integer,
            (Self::Zero | Self::Integer, b'.') => Self::Point,
            (Self::Point | Self::Fraction, b'0'..=b'9') => Self::Fraction,
            (Self::Zero | Self::Integer | Self::Fraction, b'e' | b'E') => Self::ExponentStart,
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
            Self::Zero | Self::Integer | Self::Fraction | Self::Exponent
        )
    }
}

#[derive(Debug)]
pub(super) struct JsonScanner {
    state: State,
    depth: u32,
    /// One bit per nesting level, the innermost lowest; set if the level is an object.
    objects: u128,
    /// The second nesting level is the value of `usage`.
    is_in_usage: bool,
    name: Name,
    /// The field that the current value belongs to.
    field: ScannedField,
    /// The current number so far, if it is a non-negative integer.
    count: Option<u64>,
    found: ScannedFields,
    length: u64,
    max_document_bytes: u64,
}

impl JsonScanner {
    pub(super) const fn new(max_document_bytes: u64) -> Self {
        Self {
            state: State::Value,
            depth: 0,
            objects: 0,
            is_in_usage: false,
            name: Name {
                bytes: [0; Name::LONGEST],
                length: 0,
            },
            field: ScannedField::Other,
            count: None,
            found: ScannedFields {
                is_done: false,
                has_error: false,
                prompt_eval_count: None,
                eval_count: None,
                prompt_tokens: None,
                completion_tokens: None,
                is_remote: [false; 2],
            },
            length: 0,
            max_document_bytes,
        }
    }

    pub(super) fn push_all(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.push(*byte);
        }
    }

    pub(super) fn push(&mut self, byte: u8) {
        self.length = self.length.saturating_add(1);
        if self.length > self.max_document_bytes {
            self.state = State::Broken;
        }
        self.state = self.next(byte).unwrap_or(State::Broken);
    }

    pub(super) const fn is_overlong(&self) -> bool {
        self.length > self.max_document_bytes
    }

    /// Returns whether all bytes so far are white space.
    pub(super) const fn is_blank(&self) -> bool {
        matches!(self.state, State::Value) && self.depth == 0
    }

    /// Ends the document, adds its fields to the scan, and starts the next document. Returns the
    /// fields if the document is complete.
    pub(super) fn end(&mut self, scan: &mut AnswerScan) -> Option<ScannedFields> {
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

    /// Starts the next document.
    pub(super) const fn reset(&mut self) {
        *self = Self::new(self.max_document_bytes);
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

    /// Starts a value with its first byte.
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
                    NumberPart::Integer
                }))
            }
            _ => None,
        }
    }

    fn field_of_value(&self) -> ScannedField {
        match (self.depth, self.objects & 1 == 1) {
            (1, true) => ScannedField::outermost(self.name.get()),
            (2, true) if self.is_in_usage => ScannedField::of_usage(self.name.get()),
            _ => ScannedField::Other,
        }
    }

    /// Resets a field for a new value. The first byte alone decides the boolean fields.
    fn begin(&mut self, field: ScannedField, byte: u8) {
        let found = &mut self.found;
        match field {
            ScannedField::Other => {}
            ScannedField::Done => found.is_done = byte == b't',
            ScannedField::Error => found.has_error = byte != b'n',
            ScannedField::RemoteHost => found.is_remote[0] = false,
            ScannedField::RemoteModel => found.is_remote[1] = false,
            ScannedField::PromptEvalCount => found.prompt_eval_count = None,
            ScannedField::EvalCount => found.eval_count = None,
            ScannedField::Usage => {
                found.prompt_tokens = None;
                found.completion_tokens = None;
            }
            ScannedField::PromptTokens => found.prompt_tokens = None,
            ScannedField::CompletionTokens => found.completion_tokens = None,
        }
    }

    fn open(&mut self, is_object: bool) -> Option<State> {
        if self.depth == MAX_ANSWER_DEPTH {
            return None;
        }
        if self.depth == 1 {
            self.is_in_usage = is_object && self.field == ScannedField::Usage;
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
            ScannedField::PromptEvalCount => found.prompt_eval_count = self.count,
            ScannedField::EvalCount => found.eval_count = self.count,
            ScannedField::PromptTokens => found.prompt_tokens = self.count,
            ScannedField::CompletionTokens => found.completion_tokens = self.count,
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
                // No name of interest contains such a character, so a placeholder suffices.
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

    /// Handles one character of a string. Only names matter, and whether the two `remote_` fields
    /// have any character.
    fn character(&mut self, byte: u8, is_name: bool) {
        match self.field {
            _ if is_name => self.name.push(byte),
            ScannedField::RemoteHost => self.found.is_remote[0] = true,
            ScannedField::RemoteModel => self.found.is_remote[1] = true,
            _ => {}
        }
    }
}
