//! Configuration: a TOML file, overridden by the environment, overridden by flags. Unknown keys are
//! errors, and everything is validated before a port opens.

use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use toml::{Table, Value};

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("can't read the configuration {path}")]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("{path} is not valid TOML: {message}")]
    Syntax { path: PathBuf, message: String },
    #[error("configuration: {key}: {message}")]
    Value { key: String, message: String },
}

/// Reads section `section` of the file, `CYNODE_<SECTION>_<KEY>` of the environment and the flags,
/// in increasing precedence. Flags omit the section; a nested key such as `tls.cert` is `TLS__CERT`
/// in the environment.
pub fn load<T: DeserializeOwned>(
    path: Option<&Path>,
    section: &str,
    environment: impl IntoIterator<Item = (String, String)>,
    flags: impl IntoIterator<Item = (String, String)>,
) -> Result<T, ConfigError> {
    let mut table = match path {
        Some(path) => read_section(path, section)?,
        None => Table::new(),
    };
    let prefix = format!("CYNODE_{}_", section.to_uppercase());
    let environment = environment.into_iter().filter_map(|(name, value)| {
        Some((
            name.strip_prefix(&prefix)?
                .to_lowercase()
                .replace("__", "."),
            value,
        ))
    });
    for (key, value) in environment.chain(flags) {
        insert(&mut table, &key, &value);
    }
    serde_path_to_error::deserialize(Value::Table(table)).map_err(|error| {
        let path = error.path().to_string();
        let key = if path == "." {
            section.to_owned()
        } else {
            format!("{section}.{path}")
        };
        ConfigError::Value {
            key,
            message: error.into_inner().message().trim().to_owned(),
        }
    })
}

fn read_section(path: &Path, section: &str) -> Result<Table, ConfigError> {
    let text = fs_err::read_to_string(path).map_err(|source| ConfigError::Read {
        path: path.to_owned(),
        source,
    })?;
    let mut table: Table = text
        .parse()
        .map_err(|error: toml::de::Error| ConfigError::Syntax {
            path: path.to_owned(),
            message: error.to_string(),
        })?;
    if let Some(unknown) = table.keys().find(|key| !SECTIONS.contains(&key.as_str())) {
        return Err(ConfigError::Value {
            key: unknown.clone(),
            message: format!("unknown section; expected one of {}", SECTIONS.join(", ")),
        });
    }
    match table.remove(section) {
        None => Ok(Table::new()),
        Some(Value::Table(table)) => Ok(table),
        Some(_) => Err(ConfigError::Value {
            key: section.to_owned(),
            message: "must be a section".to_owned(),
        }),
    }
}

/// The sections that a configuration file may have.
const SECTIONS: &[&str] = &["egress", "orchestrator", "worker"];

/// Sets a possibly nested key. The value is parsed as TOML, or else taken as a string.
fn insert(table: &mut Table, key: &str, value: &str) {
    if let Some((outer, inner)) = key.split_once('.')
        && let Value::Table(nested) = table
            .entry(outer)
            .or_insert_with(|| Value::Table(Table::new()))
    {
        return insert(nested, inner, value);
    }
    let parsed = format!("value = {value}")
        .parse::<Table>()
        .ok()
        .and_then(|mut table| table.remove("value"))
        .unwrap_or_else(|| Value::String(value.to_owned()));
    table.insert(key.to_owned(), parsed);
}

/// The default state directory of the platform.
#[must_use]
pub fn default_state_dir(is_root: bool, environment: impl Fn(&str) -> Option<String>) -> PathBuf {
    if is_root {
        return PathBuf::from("/var/lib/cynode");
    }
    environment("XDG_STATE_HOME")
        .filter(|path| path.starts_with('/'))
        .map_or_else(
            || {
                PathBuf::from(environment("HOME").unwrap_or_else(|| "/".to_owned()))
                    .join(".local/state/cynode")
            },
            |path| PathBuf::from(path).join("cynode"),
        )
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Default, Deserialize, PartialEq)]
    #[serde(deny_unknown_fields, default)]
    struct Sample {
        listen: String,
        size: u32,
    }

    fn sample(environment: &[(&str, &str)], flags: &[(&str, &str)]) -> Result<Sample, ConfigError> {
        let own = |pairs: &[(&str, &str)]| {
            pairs
                .iter()
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect::<Vec<_>>()
        };
        load(None, "worker", own(environment), own(flags))
    }

    #[test]
    fn flags_win_over_the_environment() {
        let read = sample(
            &[
                ("CYNODE_WORKER_LISTEN", "a"),
                ("CYNODE_WORKER_SIZE", "3"),
                ("OTHER", "x"),
            ],
            &[("listen", "b")],
        )
        .expect("valid");
        assert_eq!(
            read,
            Sample {
                listen: "b".to_owned(),
                size: 3
            }
        );
    }

    #[test]
    fn a_dot_reaches_into_a_table() {
        let mut table = Table::new();
        insert(&mut table, "tls.cert", "/a");
        insert(&mut table, "tls.key", "/b");
        assert_eq!(table["tls"]["cert"].as_str(), Some("/a"));
        assert_eq!(table["tls"]["key"].as_str(), Some("/b"));
    }

    #[test]
    fn an_unknown_key_is_named() {
        let error = sample(&[("CYNODE_WORKER_LISTN", "a")], &[])
            .expect_err("unknown")
            .to_string();
        assert!(error.contains("listn"), "{error}");
    }

    #[test]
    fn a_value_of_the_wrong_type_names_its_key() {
        let error = sample(&[], &[("size", "many")])
            .expect_err("not a number")
            .to_string();
        assert!(error.contains("worker.size"), "{error}");
    }
}
