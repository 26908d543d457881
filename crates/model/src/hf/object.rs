//! A JSON object whose every key must be accounted for.

use crate::config::ConfigError;
use crate::gguf::shown;
use serde_json::{Map, Value};

/// Why a config.json was refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigFileError {
    /// The operating system refused, or the file is too large.
    #[error("cannot be read: {0}")]
    Io(std::io::Error),
    /// Not JSON.
    #[error("not valid JSON: {0}")]
    Json(serde_json::Error),
    /// Not an object.
    #[error("it holds {given}, allowed: an object")]
    NoObject {
        /// What it holds.
        given: String,
    },
    /// A key is needed and absent.
    #[error("key \"{key}\" is missing")]
    Missing {
        /// The key.
        key: String,
    },
    /// A key's value is of the wrong type or not supported.
    #[error("key \"{key}\" is {given}, allowed: {allowed}")]
    Key {
        /// The key.
        key: String,
        /// Its value.
        given: String,
        /// What is allowed.
        allowed: String,
    },
    /// A key that may change the result.
    #[error(
        "key \"{key}\" is not understood and may change the result; its value is {given}, allowed: null or no such key"
    )]
    Unknown {
        /// The key.
        key: String,
        /// Its value.
        given: String,
    },
    /// The values do not make a model.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

/// A JSON object whose keys are crossed off as they are read.
pub(super) struct Object<'a> {
    map: &'a Map<String, Value>,
    /// Where it lies: empty, or the key that holds it and a dot.
    prefix: String,
    read: Vec<&'static str>,
}

impl<'a> Object<'a> {
    pub fn new(map: &'a Map<String, Value>, prefix: impl Into<String>) -> Self {
        Self {
            map,
            prefix: prefix.into(),
            read: Vec::new(),
        }
    }

    /// A key with where it lies.
    pub fn full(&self, key: &str) -> String {
        format!("{}{}", self.prefix, shown(key))
    }

    /// The value; null counts as absent.
    pub fn get(&mut self, key: &'static str) -> Option<&'a Value> {
        self.read.push(key);
        self.map.get(key).filter(|v| !v.is_null())
    }

    pub fn refused(&self, key: &str, given: &Value, allowed: &str) -> ConfigFileError {
        ConfigFileError::Key {
            key: self.full(key),
            given: shown(&given.to_string()),
            allowed: allowed.to_string(),
        }
    }

    pub fn required<T>(&self, key: &str, value: Option<T>) -> Result<T, ConfigFileError> {
        value.ok_or_else(|| ConfigFileError::Missing {
            key: self.full(key),
        })
    }

    pub fn as_type<T>(
        &mut self,
        key: &'static str,
        allowed: &str,
        convert: fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ConfigFileError> {
        match self.get(key) {
            None => Ok(None),
            Some(v) => convert(v)
                .map(Some)
                .ok_or_else(|| self.refused(key, v, allowed)),
        }
    }

    pub fn size(&mut self, key: &'static str) -> Result<Option<usize>, ConfigFileError> {
        self.as_type(key, "an integer that is not negative", |v| {
            v.as_u64().and_then(|n| n.try_into().ok())
        })
    }

    pub fn required_size(&mut self, key: &'static str) -> Result<usize, ConfigFileError> {
        let value = self.size(key)?;
        self.required(key, value)
    }

    pub fn number(&mut self, key: &'static str) -> Result<Option<f64>, ConfigFileError> {
        self.as_type(key, "a number", Value::as_f64)
    }

    /// A size; where it is absent, what the architecture's files leave unsaid.
    pub fn size_or(
        &mut self,
        key: &'static str,
        unsaid: Option<usize>,
    ) -> Result<usize, ConfigFileError> {
        let value = self.size(key)?.or(unsaid);
        self.required(key, value)
    }

    pub fn required_number(&mut self, key: &'static str) -> Result<f64, ConfigFileError> {
        let value = self.number(key)?;
        self.required(key, value)
    }

    pub fn bool(&mut self, key: &'static str) -> Result<Option<bool>, ConfigFileError> {
        self.as_type(key, "true or false", Value::as_bool)
    }

    pub fn str(&mut self, key: &'static str) -> Result<Option<&'a str>, ConfigFileError> {
        self.as_type(key, "a string", Value::as_str)
    }

    pub fn object(
        &mut self,
        key: &'static str,
    ) -> Result<Option<&'a Map<String, Value>>, ConfigFileError> {
        self.as_type(key, "an object or null", Value::as_object)
    }

    /// Refuses any value but the one whose meaning is implemented.
    pub fn only(&mut self, key: &'static str, allowed: &Value) -> Result<(), ConfigFileError> {
        match self.get(key) {
            Some(v) if v != allowed => Err(self.refused(key, v, &allowed.to_string())),
            _ => Ok(()),
        }
    }

    pub fn refuse_unknown(&self, benign: &[&[&str]]) -> Result<(), ConfigFileError> {
        for (key, value) in self.map {
            let key_is = |list: &&[&str]| list.contains(&key.as_str());
            let known = self.read.contains(&key.as_str()) || benign.iter().any(key_is);
            if !known && !value.is_null() {
                return Err(ConfigFileError::Unknown {
                    key: self.full(key),
                    given: shown(&value.to_string()),
                });
            }
        }
        Ok(())
    }
}
