//! Why the bridge could not do what it was asked, as clients and models see it.

use serde_json::{Map, Value, json};

use crate::failure::Failure;

/// A failure that can be told several times.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub code: String,
    message: String,
    remedy: Option<String>,
}

impl Refusal {
    pub fn new(code: &str, message: impl Into<String>) -> Self {
        Self {
            code: code.to_owned(),
            message: message.into(),
            remedy: None,
        }
    }

    #[must_use]
    pub fn remedy(self, remedy: impl Into<String>) -> Self {
        Self {
            remedy: Some(remedy.into()),
            ..self
        }
    }

    /// The message and what to do about it.
    pub fn text(&self) -> String {
        let Self {
            code,
            message,
            remedy,
        } = self;
        match remedy {
            Some(remedy) => format!("{code}: {message}. {remedy}"),
            None => format!("{code}: {message}."),
        }
    }

    /// The members that a failed tool call has.
    pub fn structure(&self, stage: &str) -> Value {
        let mut members = Map::new();
        members.insert("code".to_owned(), json!(self.code));
        members.insert("stage".to_owned(), json!(stage));
        members.insert("message".to_owned(), json!(self.message));
        if let Some(remedy) = &self.remedy {
            members.insert("remedy".to_owned(), json!(remedy));
        }
        Value::Object(members)
    }
}

impl From<&Failure> for Refusal {
    fn from(failure: &Failure) -> Self {
        Self {
            code: failure.code().to_owned(),
            message: failure.message().to_owned(),
            remedy: failure.remedy_text().map(str::to_owned),
        }
    }
}

impl From<Failure> for Refusal {
    fn from(failure: Failure) -> Self {
        Self::from(&failure)
    }
}

impl From<cynode_client::Error> for Refusal {
    fn from(error: cynode_client::Error) -> Self {
        Failure::from(error).into()
    }
}

impl From<std::io::Error> for Refusal {
    fn from(error: std::io::Error) -> Self {
        Failure::from(error).into()
    }
}
