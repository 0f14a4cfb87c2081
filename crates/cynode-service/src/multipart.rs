//! A strict streaming parser for `multipart/form-data` (RFC 7578).
//!
//! Invariants: memory is bounded by the pieces of the body and the limits below; ambiguous bodies
//! are refused: no bytes before the first delimiter or after the last one, a delimiter is a whole
//! line, a part has exactly one name.

use axum::body::{Body, BodyDataStream};
use bytes::{Buf as _, Bytes, BytesMut};
use cynode_api::{
    ErrorCode,
    exec_limits::{MAX_FORM_STDIN_BYTES, MAX_REQUEST_BYTES},
};
use futures_util::StreamExt as _;
use http::{HeaderMap, header};

use crate::{ApiError, body};

/// The longest boundary (RFC 2046).
const MAX_BOUNDARY: usize = 70;
/// All header lines of a part, in bytes.
const MAX_PART_HEAD: usize = 4 * 1024;
const MAX_PART_HEADERS: usize = 16;
const MAX_NAME: usize = 64;

/// The boundary if the body is a form; `None` for another content type.
pub fn boundary(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    let mut types = headers.get_all(header::CONTENT_TYPE).iter();
    let Some(kind) = types.next() else {
        return Ok(None);
    };
    let invalid = |why: &str| Err(ApiError::invalid(format!("content-type: {why}")));
    let Some(kind) = kind.to_str().ok() else {
        return Ok(None);
    };
    let (essence, parameters) = kind.split_once(';').unwrap_or((kind, ""));
    if !essence.trim().eq_ignore_ascii_case("multipart/form-data") {
        return Ok(None);
    }
    if types.next().is_some() {
        return invalid("is there twice");
    }
    let mut found = None;
    for parameter in parameters
        .split(';')
        .map(str::trim)
        .filter(|parameter| !parameter.is_empty())
    {
        let Some((name, value)) = parameter.split_once('=') else {
            return invalid("a parameter has no value");
        };
        if !name.trim().eq_ignore_ascii_case("boundary") {
            continue;
        }
        let value = value.trim();
        let value = value
            .strip_prefix('"')
            .and_then(|value| value.strip_suffix('"'))
            .unwrap_or(value);
        if found.replace(value.to_owned()).is_some() {
            return invalid("the boundary is there twice");
        }
    }
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"'()+_,-./:=? ".contains(&byte);
    match found {
        None => invalid("multipart/form-data needs a boundary"),
        Some(boundary)
            if (1..=MAX_BOUNDARY).contains(&boundary.len())
                && boundary.bytes().all(is_allowed)
                && !boundary.ends_with(' ') =>
        {
            Ok(Some(boundary))
        }
        Some(_) => invalid(
            "the boundary must be 1 to 70 letters, digits or '()+_,-./:=? and not end in a blank",
        ),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FormState {
    /// Before the first delimiter.
    Start,
    /// Before the head of a part.
    Between,
    Within,
    Ended,
}

/// A form, read part by part.
#[derive(Debug)]
pub struct Multipart {
    pieces: BodyDataStream,
    buffer: BytesMut,
    /// Includes the line end before it.
    delimiter: Vec<u8>,
    state: FormState,
}

impl Multipart {
    #[must_use]
    pub fn new(body: Body, boundary: &str) -> Self {
        // The first delimiter has no preceding line.
        Self {
            pieces: body.into_data_stream(),
            buffer: BytesMut::from(&b"\r\n"[..]),
            delimiter: format!("\r\n--{boundary}").into_bytes(),
            state: FormState::Start,
        }
    }

    /// The name of the next part; `None` after the last one. Skips the unread rest of the current
    /// part.
    pub async fn next_part(&mut self) -> Result<Option<String>, ApiError> {
        if self.state == FormState::Start {
            self.state = FormState::Within;
            if self.next_piece().await?.is_some() {
                return Err(ApiError::invalid("the body must begin with its boundary"));
            }
        }
        while self.next_piece().await?.is_some() {}
        if self.state == FormState::Ended {
            return Ok(None);
        }
        let head = loop {
            if let Some(end) = memchr::memmem::find(&self.buffer, b"\r\n\r\n")
                .filter(|end| end + 4 <= MAX_PART_HEAD)
            {
                break self.buffer.split_to(end + 4);
            }
            if self.buffer.len() > MAX_PART_HEAD {
                return Err(ApiError::invalid(format!(
                    "the head of a part is longer than {MAX_PART_HEAD} bytes"
                )));
            }
            if !self.fill().await? {
                return Err(cut_off());
            }
        };
        self.state = FormState::Within;
        part_name(&head[..head.len() - 4]).map(Some)
    }

    /// The next bytes of the current part; `None` at its end.
    pub async fn next_piece(&mut self) -> Result<Option<Bytes>, ApiError> {
        if self.state != FormState::Within {
            return Ok(None);
        }
        loop {
            if let Some(at) = memchr::memmem::find(&self.buffer, &self.delimiter) {
                if at > 0 {
                    return Ok(Some(self.buffer.split_to(at).freeze()));
                }
                return self.pass_delimiter().await.map(|()| None);
            }
            // The end of the buffer may be the start of a delimiter.
            let sure = (self.buffer.len() + 1).saturating_sub(self.delimiter.len());
            if sure > 0 {
                return Ok(Some(self.buffer.split_to(sure).freeze()));
            }
            if !self.fill().await? {
                return Err(cut_off());
            }
        }
    }

    /// Reads past a delimiter: a line end before the next part, or `--` at the end.
    async fn pass_delimiter(&mut self) -> Result<(), ApiError> {
        let length = self.delimiter.len();
        while self.buffer.len() < length + 2 {
            if !self.fill().await? {
                return Err(cut_off());
            }
        }
        self.buffer.advance(length);
        match &self.buffer[..2] {
            b"\r\n" => {
                self.buffer.advance(2);
                self.state = FormState::Between;
                Ok(())
            }
            b"--" => {
                self.buffer.advance(2);
                while self.buffer.len() <= 2 && self.fill().await? {}
                if !matches!(&self.buffer[..], b"" | b"\r\n") {
                    return Err(ApiError::invalid(
                        "the body goes on after its last boundary",
                    ));
                }
                self.state = FormState::Ended;
                Ok(())
            }
            _ => Err(ApiError::invalid(
                "a boundary is not followed by a line end; choose one that no part holds",
            )),
        }
    }

    /// Buffers more of the body. False at its end.
    async fn fill(&mut self) -> Result<bool, ApiError> {
        match self.pieces.next().await {
            Some(Ok(piece)) => {
                self.buffer.extend_from_slice(&piece);
                Ok(true)
            }
            Some(Err(error)) => Err(body::problem(
                &error,
                "the body could not be read to its end",
            )),
            None => Ok(false),
        }
    }
}

fn cut_off() -> ApiError {
    ApiError::invalid("the body ends before its last boundary")
}

/// The name of a part, from its header lines.
fn part_name(head: &[u8]) -> Result<String, ApiError> {
    let text = std::str::from_utf8(head)
        .map_err(|_| ApiError::invalid("the head of a part is not UTF-8"))?;
    let mut disposition = None;
    for (number, line) in text.split("\r\n").enumerate() {
        let Some((name, value)) = line.split_once(':').filter(|(name, _)| {
            !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_graphic())
        }) else {
            return Err(ApiError::invalid(
                "a header line of a part is not 'name: value'",
            ));
        };
        if number >= MAX_PART_HEADERS {
            return Err(ApiError::invalid(format!(
                "a part has more than {MAX_PART_HEADERS} header lines"
            )));
        }
        let value = value.trim();
        match name.to_ascii_lowercase().as_str() {
            "content-disposition" if disposition.replace(value).is_some() => {
                return Err(ApiError::invalid(
                    "a part has two content-disposition lines",
                ));
            }
            "content-transfer-encoding"
                if !["binary", "8bit", "7bit"]
                    .iter()
                    .any(|plain| value.eq_ignore_ascii_case(plain)) =>
            {
                return Err(ApiError::invalid(
                    "content-transfer-encoding: parts are sent as they are (binary)",
                ));
            }
            _ => {}
        }
    }
    let missing =
        || ApiError::invalid("a part has no 'content-disposition: form-data; name=\"…\"'");
    let mut parameters = parameters(disposition.ok_or_else(missing)?)?.into_iter();
    if !parameters
        .next()
        .is_some_and(|(kind, value)| kind.eq_ignore_ascii_case("form-data") && value.is_none())
    {
        return Err(missing());
    }
    let mut names = parameters.filter(|(name, _)| name.eq_ignore_ascii_case("name"));
    match (names.next(), names.next()) {
        (Some((_, Some(name))), None) if (1..=MAX_NAME).contains(&name.len()) => Ok(name),
        (Some(_), None) => Err(ApiError::invalid(format!(
            "a part's name must have 1 to {MAX_NAME} bytes"
        ))),
        (Some(_), Some(_)) => Err(ApiError::invalid("a part is named twice")),
        (None, _) => Err(missing()),
    }
}

/// `a; b=c; d="e \" f"`.
fn parameters(text: &str) -> Result<Vec<(String, Option<String>)>, ApiError> {
    let broken = || ApiError::invalid("content-disposition: a quoted value does not end");
    let mut all = Vec::new();
    let mut rest = text;
    while !rest.trim().is_empty() {
        let end = rest.find([';', '=']).unwrap_or(rest.len());
        let name = rest[..end].trim().to_owned();
        let mut value = None;
        rest = &rest[end..];
        if let Some(after) = rest.strip_prefix('=') {
            let after = after.trim_start();
            if let Some(quoted) = after.strip_prefix('"') {
                let (mut text, mut escaped, mut end) = (String::new(), false, None);
                for (at, letter) in quoted.char_indices() {
                    match letter {
                        '\\' if !escaped => escaped = true,
                        '"' if !escaped => {
                            end = Some(at + 1);
                            break;
                        }
                        letter => {
                            text.push(letter);
                            escaped = false;
                        }
                    }
                }
                rest = quoted[end.ok_or_else(broken)?..].trim_start();
                if !rest.is_empty() && !rest.starts_with(';') {
                    return Err(ApiError::invalid(
                        "content-disposition: something follows a quoted value",
                    ));
                }
                value = Some(text);
            } else {
                let end = after.find(';').unwrap_or(after.len());
                value = Some(after[..end].trim().to_owned());
                rest = &after[end..];
            }
        }
        rest = rest.strip_prefix(';').unwrap_or(rest);
        all.push((name, value));
    }
    Ok(all)
}

/// The form of an exec: a part `request`, then a part `stdin`.
#[derive(Debug)]
pub struct ExecForm {
    form: Multipart,
    request_bytes_left: usize,
    /// The bytes of input that are still allowed.
    left: u64,
}

impl ExecForm {
    /// Opens the form at its part `request`, which `next_request_piece` returns.
    pub async fn open(body: Body, boundary: &str) -> Result<Self, ApiError> {
        let mut form = Multipart::new(body, boundary);
        expect(form.next_part().await?, "request", "first")?;
        Ok(Self {
            form,
            request_bytes_left: MAX_REQUEST_BYTES,
            left: MAX_FORM_STDIN_BYTES,
        })
    }

    /// The next bytes of the request; `None` where the input follows.
    pub async fn next_request_piece(&mut self) -> Result<Option<Bytes>, ApiError> {
        let Some(piece) = self.form.next_piece().await? else {
            expect(self.form.next_part().await?, "stdin", "after 'request'")?;
            return Ok(None);
        };
        let left = self.request_bytes_left.checked_sub(piece.len());
        self.request_bytes_left = left.ok_or_else(|| {
            let detail = format!("request: more than {MAX_REQUEST_BYTES} bytes");
            ApiError::new(ErrorCode::TooLarge, detail)
        })?;
        Ok(Some(piece))
    }

    /// Opens the form and reads its request into memory; `next_piece` then returns the input.
    pub async fn open_with_request(body: Body, boundary: &str) -> Result<(Bytes, Self), ApiError> {
        let mut form = Self::open(body, boundary).await?;
        let mut request = BytesMut::new();
        while let Some(piece) = form.next_request_piece().await? {
            request.extend_from_slice(&piece);
        }
        Ok((request.freeze(), form))
    }

    /// The next bytes of the input; `None` at the end of the form.
    pub async fn next_piece(&mut self) -> Result<Option<Bytes>, ApiError> {
        if let Some(piece) = self.form.next_piece().await? {
            let left = self.left.checked_sub(piece.len() as u64);
            self.left = left.ok_or_else(|| {
                let detail = format!(
                    "stdin: more than {MAX_FORM_STDIN_BYTES} bytes; put it into a file, \
                     or use stdin_open and the stdin call"
                );
                ApiError::new(ErrorCode::TooLarge, detail)
            })?;
            return Ok(Some(piece));
        }
        match self.form.next_part().await? {
            None => Ok(None),
            Some(name) => Err(ApiError::invalid(format!(
                "part '{}': nothing follows the part 'stdin'",
                name.escape_debug()
            ))),
        }
    }
}

fn expect(found: Option<String>, wanted: &str, place: &str) -> Result<(), ApiError> {
    match found {
        Some(name) if name == wanted => Ok(()),
        Some(name) => Err(ApiError::invalid(format!(
            "part '{}': a part '{wanted}' must come {place}",
            name.escape_debug()
        ))),
        None => Err(ApiError::invalid(format!("the part '{wanted}' is missing"))),
    }
}

#[cfg(test)]
mod tests {
    use cynode_api::exec_form;
    use futures_util::stream;
    use http::HeaderValue;
    use proptest::prelude::*;

    use super::*;

    fn body(bytes: &[u8], piece: usize) -> Body {
        let pieces: Vec<_> = bytes
            .chunks(piece.max(1))
            .map(|piece| Ok::<_, std::io::Error>(Bytes::copy_from_slice(piece)))
            .collect();
        Body::from_stream(stream::iter(pieces))
    }

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread()
            .build()
            .expect("a runtime")
            .block_on(future)
    }

    /// All parts of a form, or the error.
    fn parts(bytes: &[u8], boundary: &str, piece: usize) -> Result<Vec<(String, Vec<u8>)>, String> {
        block_on(async {
            let mut form = Multipart::new(body(bytes, piece), boundary);
            let mut all = Vec::new();
            while let Some(name) = form
                .next_part()
                .await
                .map_err(|error| error.into_problem().detail)?
            {
                let mut content = Vec::new();
                while let Some(piece) = form
                    .next_piece()
                    .await
                    .map_err(|error| error.into_problem().detail)?
                {
                    content.extend_from_slice(&piece);
                }
                all.push((name, content));
            }
            Ok(all)
        })
    }

    fn exec(bytes: &[u8], piece: usize) -> Result<(Vec<u8>, Vec<u8>), String> {
        block_on(async {
            let (request, mut form) = ExecForm::open_with_request(body(bytes, piece), "B")
                .await
                .map_err(|error| error.into_problem().detail)?;
            let mut stdin = Vec::new();
            while let Some(piece) = form
                .next_piece()
                .await
                .map_err(|error| error.into_problem().detail)?
            {
                stdin.extend_from_slice(&piece);
            }
            Ok((request.to_vec(), stdin))
        })
    }

    fn whole(boundary: &str, request: &[u8], stdin: &[u8]) -> Vec<u8> {
        let (head, tail) = exec_form(boundary, request);
        [&head, stdin, &tail].concat()
    }

    #[test]
    fn a_boundary_is_parsed_in_every_notation() {
        let read = |kind: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(
                header::CONTENT_TYPE,
                HeaderValue::from_str(kind).expect("a header"),
            );
            boundary(&headers).map_err(|error| error.into_problem().detail)
        };
        let some = |text: &str| Ok(Some(text.to_owned()));
        assert_eq!(read("application/json"), Ok(None));
        assert_eq!(read("multipart/mixed; boundary=x"), Ok(None));
        assert_eq!(
            read("multipart/form-data; boundary=----WebKitFormBoundary7MA4"),
            some("----WebKitFormBoundary7MA4")
        );
        assert_eq!(
            read("Multipart/Form-Data;charset=utf-8; Boundary=\"a b\""),
            some("a b")
        );
        assert_eq!(
            read(&format!("multipart/form-data; boundary={}", "x".repeat(70))),
            some(&"x".repeat(70))
        );
        for wrong in [
            "",
            "; boundary=",
            "; boundary=a; boundary=b",
            "; boundary=\"a \"",
            "; boundary=a@b",
            "; boundary",
        ] {
            assert!(
                read(&format!("multipart/form-data{wrong}")).is_err(),
                "{wrong}"
            );
        }
        assert!(read(&format!("multipart/form-data; boundary={}", "x".repeat(71))).is_err());
        assert_eq!(
            boundary(&HeaderMap::new()).map_err(|error| error.into_problem().detail),
            Ok(None)
        );
    }

    #[test]
    fn a_form_sent_by_curl_is_parsed() {
        let form = b"--B\r\nContent-Disposition: form-data; name=\"request\"; filename=\"a \\\"b;c.json\"\r\nContent-Type: application/json\r\n\r\n{}\r\n--B\r\ncontent-disposition:form-data;name=stdin\r\nContent-Transfer-Encoding: binary\r\n\r\n\r\n--B--\r\n";
        for piece in [1, 2, 5, 1_000] {
            assert_eq!(exec(form, piece), Ok((b"{}".to_vec(), Vec::new())));
        }
    }

    #[test]
    fn a_malformed_form_is_refused_with_the_reason() {
        let part = |name: &str| {
            format!("--B\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\nx\r\n")
        };
        let (request, stdin) = (part("request"), part("stdin"));
        for (form, expected) in [
            (String::new(), "ends before its last boundary"),
            ("--B--".to_owned(), "'request' is missing"),
            (format!("{request}--B--"), "'stdin' is missing"),
            (
                format!("{stdin}{request}--B--"),
                "'request' must come first",
            ),
            (
                format!("{request}{request}--B--"),
                "'stdin' must come after",
            ),
            (format!("{request}{stdin}{stdin}--B--"), "nothing follows"),
            (
                format!("{request}{stdin}{}--B--", part("\u{1b}[31m")),
                "part '\\u{1b}[31m': nothing follows",
            ),
            (format!("{request}{stdin}"), "ends before"),
            (format!("{request}{stdin}--B--\r\nmore"), "goes on after"),
            (format!("{request}{stdin}--B--x"), "goes on after"),
            (
                format!("preamble\r\n{request}{stdin}--B--"),
                "begin with its boundary",
            ),
            (
                format!("\r\n{request}{stdin}--B--"),
                "begin with its boundary",
            ),
            (
                format!("{request}--Bx\r\n{stdin}--B--"),
                "not followed by a line end",
            ),
            (
                request.replace("; name=\"request\"", ""),
                "no 'content-disposition",
            ),
            (
                request.replace("form-data", "attachment"),
                "no 'content-disposition",
            ),
            (
                request.replace("name=\"request\"", "name=a; name=b"),
                "named twice",
            ),
            (request.replace("\"request\"", "\"request"), "does not end"),
            (request.replace("request", ""), "1 to 64 bytes"),
            (request.replace("request", &"n".repeat(65)), "1 to 64 bytes"),
            (
                request.replace("Content-Disposition", "Content Disposition"),
                "not 'name: value'",
            ),
            (format!("--B\r\n\r\n{request}"), "not 'name: value'"),
            (
                request.replace("\r\n\r\n", "\r\nContent-Transfer-Encoding: base64\r\n\r\n"),
                "binary",
            ),
            (
                request.replace("\r\n\r\n", &format!("\r\n{}\r\n", "A: b\r\n".repeat(16))),
                "more than 16 header lines",
            ),
            (
                request.replace(
                    "\r\n\r\n",
                    &format!("\r\nA: {}\r\n\r\n", "x".repeat(MAX_PART_HEAD)),
                ),
                "head of a part is longer",
            ),
        ] {
            for piece in [1, 3, 10_000] {
                let error = exec(form.as_bytes(), piece).expect_err(&form);
                assert!(error.contains(expected), "{expected:?}: {error} ({form})");
            }
        }
    }

    #[test]
    fn a_request_and_input_have_a_limit() {
        let request = vec![b' '; MAX_REQUEST_BYTES];
        assert_eq!(
            exec(&whole("B", &request, b"in"), 65_536).map(|(request, _)| request.len()),
            Ok(MAX_REQUEST_BYTES)
        );
        let request = vec![b' '; MAX_REQUEST_BYTES + 1];
        assert!(
            exec(&whole("B", &request, b"in"), 65_536)
                .is_err_and(|error| error.contains("request: more than"))
        );
        assert_eq!(MAX_FORM_STDIN_BYTES, 100 * 1024 * 1024);
        for (size, read) in [(10, Ok(10)), (11, Err("too_large".to_owned()))] {
            let count = block_on(async {
                let (_, mut form) =
                    ExecForm::open_with_request(body(&whole("B", b"{}", &vec![0; size]), 7), "B")
                        .await
                        .map_err(|error| error.into_problem().code)?;
                form.left = 10;
                let mut count = 0;
                while let Some(piece) = form
                    .next_piece()
                    .await
                    .map_err(|error| error.into_problem().code)?
                {
                    count += piece.len();
                }
                Ok::<_, String>(count)
            });
            assert_eq!(count, read);
        }
    }

    const WORDS: &[&[u8]] = &[
        b"--B",
        b"\r\n",
        b"--",
        b"\r\n\r\n",
        b"Content-Disposition: form-data; name=\"a\"",
        b"\"",
        b";",
        b"x",
    ];

    proptest! {
        #[test]
        fn any_input_round_trips_through_a_form(
            // Full of near-delimiters.
            stdin in proptest::collection::vec(prop_oneof![any::<u8>(), proptest::sample::select(&b"\r\n--B"[..])], 0..300),
            piece in 1_usize..40,
        ) {
            prop_assume!(memchr::memmem::find(&[&b"\r\n"[..], &stdin].concat(), b"\r\n--B").is_none());
            prop_assert_eq!(exec(&whole("B", b"{}", &stdin), piece), Ok((b"{}".to_vec(), stdin)));
        }

        #[test]
        fn arbitrary_bytes_are_read_the_same_in_any_split_and_never_panic(
            bytes in proptest::collection::vec(prop_oneof![
                3 => proptest::sample::select(WORDS).prop_map(<[u8]>::to_vec),
                1 => proptest::collection::vec(any::<u8>(), 0..4),
            ], 0..40).prop_map(|all| all.concat()),
            piece in 1_usize..30,
        ) {
            prop_assert_eq!(parts(&bytes, "B", piece), parts(&bytes, "B", 100_000));
        }
    }
}
