//! Text inside base64.

use base64::{
    Engine as _, alphabet,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};

/// Others may be lenient, so this is: padding or none, and whatever the last bits are.
const LENIENT: GeneralPurposeConfig = GeneralPurposeConfig::new()
    .with_encode_padding(false)
    .with_decode_padding_mode(DecodePaddingMode::Indifferent)
    .with_decode_allow_trailing_bits(true);
pub(super) const STANDARD: GeneralPurpose = GeneralPurpose::new(&alphabet::STANDARD, LENIENT);
const URL_SAFE: GeneralPurpose = GeneralPurpose::new(&alphabet::URL_SAFE, LENIENT);

/// Which letter of base64 is the first that holds nothing but the text, when so many bytes come before it.
pub(super) const FIRST_LETTER: [usize; 3] = [0, 2, 3];

/// How bytes look inside base64 after 0, 1 and 2 other bytes: the letters that are theirs alone. What comes before and after shares
/// the letters at both ends, so these are left out.
pub(super) fn encodings(bytes: &[u8], engine: &GeneralPurpose) -> [Vec<u8>; 3] {
    [0, 1, 2].map(|shift| {
        let mut shifted = vec![0; shift];
        shifted.extend_from_slice(bytes);
        let letters = engine.encode(&shifted).into_bytes();
        letters[FIRST_LETTER[shift]..shifted.len() * 8 / 6].to_vec()
    })
}

/// The same in both alphabets; often they do not differ.
pub(super) fn all_encodings(bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut all: Vec<Vec<u8>> = [STANDARD, URL_SAFE]
        .iter()
        .flat_map(|engine| encodings(bytes, engine))
        .collect();
    all.sort();
    all.dedup();
    all
}

/// What the base64 at the start of these bytes says, whichever alphabet it uses, as far as whole bytes go.
pub(super) fn decode_start(bytes: &[u8]) -> Vec<u8> {
    let letters = bytes.iter().map_while(|byte| match byte {
        b'+' => Some(b'-'),
        b'/' => Some(b'_'),
        byte if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_') => Some(*byte),
        _ => None,
    });
    let mut letters: Vec<u8> = letters.collect();
    if letters.len() % 4 == 1 {
        // Six bits are no byte.
        letters.pop();
    }
    URL_SAFE.decode(letters).unwrap_or_default()
}

/// A whole text, in either alphabet, with or without padding.
pub(super) fn decode(text: &str) -> Option<Vec<u8>> {
    let text = text.trim_ascii();
    STANDARD
        .decode(text)
        .or_else(|_| URL_SAFE.decode(text))
        .ok()
}
