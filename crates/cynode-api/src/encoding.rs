//! Bytes in JSON: text if they are UTF-8, base64 otherwise.

use base64::{Engine, engine::general_purpose::STANDARD};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

/// Bytes as a base64 string.
#[derive(Clone, Debug, Default, PartialEq, Eq, utoipa::ToSchema)]
#[schema(value_type = String, format = "byte")]
pub struct Base64Bytes(pub Vec<u8>);

impl Serialize for Base64Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&STANDARD.encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for Base64Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        STANDARD
            .decode(text.as_bytes())
            .map(Self)
            .map_err(|error| D::Error::custom(format_args!("not base64: {error}")))
    }
}

/// Encodes both streams the same way: `utf-8` if both are valid UTF-8, `base64` otherwise.
#[must_use]
pub fn encode_streams(stdout: Vec<u8>, stderr: Vec<u8>) -> (String, String, &'static str) {
    match (String::from_utf8(stdout), String::from_utf8(stderr)) {
        (Ok(stdout), Ok(stderr)) => (stdout, stderr, "utf-8"),
        (stdout, stderr) => {
            let bytes = |stream: Result<String, std::string::FromUtf8Error>| {
                stream.map_or_else(std::string::FromUtf8Error::into_bytes, String::into_bytes)
            };
            (
                STANDARD.encode(bytes(stdout)),
                STANDARD.encode(bytes(stderr)),
                "base64",
            )
        }
    }
}
