//! Secrets inside base64.

use base64::{
    Engine as _, alphabet,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};

/// As lenient as other decoders: accepts missing padding and any trailing bits.
const LENIENT: GeneralPurposeConfig = GeneralPurposeConfig::new()
    .with_encode_padding(false)
    .with_decode_padding_mode(DecodePaddingMode::Indifferent)
    .with_decode_allow_trailing_bits(true);
pub(super) const STANDARD: GeneralPurpose = GeneralPurpose::new(&alphabet::STANDARD, LENIENT);
const URL_SAFE: GeneralPurpose = GeneralPurpose::new(&alphabet::URL_SAFE, LENIENT);

/// The first base64 letter that belongs to the text alone, by the number of bytes before it (modulo
/// 3).
pub(super) const FIRST_LETTER: [usize; 3] = [0, 2, 3];

/// The base64 letters of some bytes after 0, 1 and 2 other bytes. Excludes letters at both ends
/// that share bits with neighbouring bytes.
pub(super) fn encodings(bytes: &[u8], engine: &GeneralPurpose) -> [Vec<u8>; 3] {
    [0, 1, 2].map(|shift| {
        let mut shifted = vec![0; shift];
        shifted.extend_from_slice(bytes);
        let letters = engine.encode(&shifted).into_bytes();
        letters[FIRST_LETTER[shift]..shifted.len() * 8 / 6].to_vec()
    })
}

/// The same for both alphabets, without duplicates.
pub(super) fn all_encodings(bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut all: Vec<Vec<u8>> = [STANDARD, URL_SAFE]
        .iter()
        .flat_map(|engine| encodings(bytes, engine))
        .collect();
    all.sort();
    all.dedup();
    all
}

/// Decodes the base64 at the start of these bytes, in either alphabet, up to the last whole byte.
pub(super) fn decode_start(bytes: &[u8]) -> Vec<u8> {
    let letters = bytes.iter().map_while(|byte| match byte {
        b'+' => Some(b'-'),
        b'/' => Some(b'_'),
        byte if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_') => Some(*byte),
        _ => None,
    });
    let mut letters: Vec<u8> = letters.collect();
    if letters.len() % 4 == 1 {
        // Six bits don't make a byte.
        letters.pop();
    }
    URL_SAFE.decode(letters).unwrap_or_default()
}

/// Decodes a whole text, in either alphabet, with or without padding.
pub(super) fn decode(text: &str) -> Option<Vec<u8>> {
    let text = text.trim_ascii();
    STANDARD
        .decode(text)
        .or_else(|_| URL_SAFE.decode(text))
        .ok()
}
