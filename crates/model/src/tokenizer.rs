//! Text to token ids and back: one wrapper whether the vocabulary came from `tokenizer.json` or a GGUF file.

use crate::tokenizer_bytes::ByteTable;
use serde_json::Value;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use tokenizers::DecoderWrapper;

/// Ids from this one on are refused: no published vocabulary comes near, and tables are sized by the largest id.
pub(crate) const MAX_ID: u32 = 1 << 22;

/// Added tokens that may lie beyond a model's embedding.
const EXTRA_ADDED: usize = 16;

/// Special tokens that end an answer by convention; they count as end tokens where the vocabulary has them, whether or
/// not the model's files name them.
const END_NAMES: [&str; 6] = [
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<eos>",
];

/// Why a tokenizer could not be loaded or used. Every message is one line.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// A file could not be read.
    #[error("cannot read {path}: {source}", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file or its tokenizer part does not say what it must.
    #[error("the tokenizer in {origin} is not usable: {reason}")]
    Invalid {
        /// The file, or "GGUF".
        origin: String,
        /// What is wrong, with the value given.
        reason: String,
    },
    /// A tokenizer of a kind this version does not know.
    #[error("{what} '{given}' is not supported; supported: {supported}")]
    Unsupported {
        /// Which setting.
        what: &'static str,
        /// Its value.
        given: String,
        /// What is.
        supported: &'static str,
    },
    /// The vocabulary and the model's embedding do not belong together.
    #[error("the tokenizer has {tokenizer} tokens, but the model's vocabulary has {model}")]
    DoesNotFit {
        /// Largest id of the tokenizer, plus one.
        tokenizer: usize,
        /// Rows of the model's embedding.
        model: usize,
    },
    /// Encoding failed.
    #[error("cannot tokenize: {0}")]
    Encode(String),
}

/// A vocabulary with its rules. Immutable and shareable between threads.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// The same, reading special tokens' text as plain text; made when a text first needs it.
    literal: OnceLock<tokenizers::Tokenizer>,
    /// Special tokens by content.
    special: HashMap<String, u32>,
    special_ids: HashSet<u32>,
    /// Bytes of every token where the decoder is byte-level; `None`: decoding goes through the tokenizer's own decoder.
    bytes: Option<ByteTable>,
    vocab_size: usize,
    /// Largest id that is not an added token, plus one.
    base_size: usize,
    bos: Option<u32>,
    eos: Vec<u32>,
    add_bos: bool,
    /// The tokenizer itself puts BOS first; otherwise `encode` does where `add_bos` is set.
    inner_adds_bos: bool,
}

/// What the files around a vocabulary say about its special tokens.
#[derive(Debug, Default, Clone)]
pub(crate) struct SpecialIds {
    pub bos: Option<u32>,
    /// In order of preference.
    pub eos: Vec<u32>,
    pub add_bos: Option<bool>,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`. Files beside it complete it where present: `tokenizer_config.json` (`bos_token`,
    /// `eos_token`, `add_bos_token`), `generation_config.json` and `config.json` (`bos_token_id`, `eos_token_id`, a
    /// number or a list).
    pub fn from_json_file(path: &Path) -> Result<Self, TokenizerError> {
        let text = std::fs::read(path).map_err(|source| TokenizerError::Read {
            path: path.into(),
            source,
        })?;
        let origin = path.display().to_string();
        let invalid = |reason: String| TokenizerError::Invalid {
            origin: origin.clone(),
            reason: one_line(&reason),
        };
        check_merges(&text).map_err(invalid)?;
        let inner = tokenizers::Tokenizer::from_bytes(&text).map_err(|e| invalid(e.to_string()))?;

        let folder = path.parent().unwrap_or(Path::new("."));
        let mut ids = SpecialIds::default();
        if let Some(config) = read_json(&folder.join("tokenizer_config.json"))? {
            // A token stands as a string or as an object with its content.
            let id_of = |key: &str| {
                let token = &config[key];
                let content = token.as_str().or_else(|| token["content"].as_str())?;
                inner.token_to_id(content)
            };
            ids.bos = id_of("bos_token");
            ids.eos.extend(id_of("eos_token"));
            ids.add_bos = config["add_bos_token"].as_bool();
        }
        for name in ["generation_config.json", "config.json"] {
            let Some(config) = read_json(&folder.join(name))? else {
                continue;
            };
            ids.bos = ids.bos.or_else(|| id_value(&config["bos_token_id"]));
            match &config["eos_token_id"] {
                Value::Array(list) => ids.eos.extend(list.iter().filter_map(id_value)),
                one => ids.eos.extend(id_value(one)),
            }
        }
        Self::build(inner, ids, &origin)
    }

    /// Wraps a ready tokenizer. `origin` names its source in errors.
    pub(crate) fn build(
        mut inner: tokenizers::Tokenizer,
        ids: SpecialIds,
        origin: &str,
    ) -> Result<Self, TokenizerError> {
        let invalid = |reason: String| TokenizerError::Invalid {
            origin: origin.into(),
            reason: one_line(&reason),
        };
        // Files carry truncation and padding left over from training; an engine wants the whole text and no more.
        inner
            .with_truncation(None)
            .map_err(|e| invalid(e.to_string()))?;
        inner.with_padding(None);

        let added = inner.get_added_tokens_decoder();
        let vocab = inner.get_vocab(true);
        let Some(&largest) = vocab.values().max() else {
            return Err(invalid("its vocabulary is empty".into()));
        };
        if largest >= MAX_ID {
            return Err(invalid(format!(
                "token id {largest} is above the largest allowed, {}",
                MAX_ID - 1
            )));
        }
        let base_size = vocab
            .values()
            .filter(|id| !added.contains_key(id))
            .max()
            .map_or(0, |&id| id as usize + 1);
        let special: HashMap<String, u32> = added
            .iter()
            .filter(|(_, token)| token.special)
            .map(|(&id, token)| (token.content.clone(), id))
            .collect();

        let in_vocab = |id: &u32| *id <= largest;
        let mut eos: Vec<u32> = Vec::new();
        let named = END_NAMES.iter().filter_map(|name| special.get(*name));
        for &id in ids.eos.iter().chain(named).filter(|id| in_vocab(id)) {
            if !eos.contains(&id) {
                eos.push(id);
            }
        }
        let bos = ids.bos.filter(in_vocab);

        let bytes = matches!(inner.get_decoder(), Some(DecoderWrapper::ByteLevel(_))).then(|| {
            ByteTable::new(
                largest as usize + 1,
                vocab
                    .iter()
                    .map(|(text, &id)| (id, text.as_str(), added.contains_key(&id))),
            )
        });
        let first = inner
            .encode_fast("", true)
            .map_err(|e| invalid(e.to_string()))?;
        let inner_adds_bos = bos.is_some() && first.get_ids().first() == bos.as_ref();
        Ok(Self {
            literal: OnceLock::new(),
            special_ids: special.values().copied().collect(),
            special,
            bytes,
            vocab_size: largest as usize + 1,
            base_size,
            bos,
            eos,
            add_bos: bos.is_some() && ids.add_bos.unwrap_or(inner_adds_bos),
            inner_adds_bos,
            inner,
        })
    }

    /// Token ids of `text`.
    ///
    /// `add_special`: put in front (and behind) what the tokenizer adds to a plain text, such as BOS; leave it off for
    /// a rendered chat template, which brings its own. `parse_special`: text that spells a special token becomes that
    /// token; off, it is plain text, which is what text from outside needs so that it cannot forge a turn.
    ///
    /// Bytes for which a byte-level vocabulary has no token are left out, as the reference implementation does.
    pub fn encode(
        &self,
        text: &str,
        add_special: bool,
        parse_special: bool,
    ) -> Result<Vec<u32>, TokenizerError> {
        // Reading specials as text makes a difference only where there are any: most texts share one tokenizer.
        let literal = !parse_special && self.special.keys().any(|s| text.contains(s.as_str()));
        let tokenizer = if literal {
            self.literal.get_or_init(|| {
                let mut copy = self.inner.clone();
                copy.set_encode_special_tokens(true);
                copy
            })
        } else {
            &self.inner
        };
        let by_inner = add_special && (self.add_bos || !self.inner_adds_bos);
        let encoding = tokenizer
            .encode_fast(text, by_inner)
            .map_err(|e| TokenizerError::Encode(one_line(&e.to_string())))?;
        let mut ids = encoding.get_ids().to_vec();
        if let (true, true, false, Some(bos)) =
            (add_special, self.add_bos, self.inner_adds_bos, self.bos)
        {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    /// Text of `ids`. `skip_special` leaves special tokens out. Bytes that are not UTF-8 become U+FFFD; ids outside the
    /// vocabulary add nothing.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let kept = |id: &u32| !(skip_special && self.special_ids.contains(id));
        match &self.bytes {
            Some(table) => {
                let bytes: Vec<u8> = ids
                    .iter()
                    .filter(|id| kept(id))
                    .flat_map(|&id| table.get(id))
                    .copied()
                    .collect();
                String::from_utf8_lossy(&bytes).into_owned()
            }
            // The decoders in use cannot fail; an empty text is the honest fallback for one that would.
            None => self.inner.decode(ids, skip_special).unwrap_or_default(),
        }
    }

    /// Bytes of one token where the tokenizer is byte-level.
    pub(crate) fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.bytes.as_ref().map(|table| table.get(id))
    }

    /// Bytes a token adds to a text, which need be no whole character; none for an id outside the vocabulary. `None` where
    /// the decoder is of a kind that gives a token no bytes of its own.
    pub fn bytes_of(&self, id: u32) -> Option<Vec<u8>> {
        if let Some(bytes) = self.token_bytes(id) {
            return Some(bytes.to_vec());
        }
        match self.inner.get_decoder() {
            None
            | Some(
                DecoderWrapper::Sequence(_)
                | DecoderWrapper::ByteFallback(_)
                | DecoderWrapper::Metaspace(_)
                | DecoderWrapper::Fuse(_)
                | DecoderWrapper::Replace(_),
            ) => {}
            Some(_) => return None,
        }
        let Some(content) = self.token(id) else {
            return Some(Vec::new());
        };
        let byte = content
            .strip_prefix("<0x")
            .and_then(|rest| rest.strip_suffix('>'))
            .filter(|hex| hex.len() == 2)
            .and_then(|hex| u8::from_str_radix(hex, 16).ok());
        Some(match byte {
            Some(byte) => vec![byte],
            None if self.is_special(id) => content.into_bytes(),
            None => content.replace('\u{2581}', " ").into_bytes(),
        })
    }

    /// Whether tokens are strings of bytes, so that a text's ids depend on its bytes alone, wherever it stands.
    pub fn is_byte_level(&self) -> bool {
        self.bytes.is_some()
    }

    /// The id of a token by its exact content, as it stands in the vocabulary.
    pub fn token_id(&self, content: &str) -> Option<u32> {
        self.inner.token_to_id(content)
    }

    /// The content of a token as it stands in the vocabulary.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Whether `id` is a special token, one that plain text never becomes.
    pub fn is_special(&self, id: u32) -> bool {
        self.special_ids.contains(&id)
    }

    /// Every special token's content, in order of their ids.
    pub fn special_tokens(&self) -> Vec<&str> {
        let by_id: BTreeSet<(u32, &str)> = self
            .special
            .iter()
            .map(|(s, &id)| (id, s.as_str()))
            .collect();
        by_id.into_iter().map(|(_, s)| s).collect()
    }

    /// Largest id plus one.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The beginning-of-sequence token.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// Tokens that end an answer, the model's main one first; may be empty.
    pub fn eos(&self) -> &[u32] {
        &self.eos
    }

    /// Whether `encode` with `add_special` puts BOS first.
    pub fn add_bos(&self) -> bool {
        self.add_bos
    }

    /// Refuses a tokenizer that cannot belong to a model whose embedding has `model_vocab` rows: one that has tokens
    /// the model lacks, or far fewer than the model has (embeddings are padded by a few percent at most). A handful of
    /// added tokens beyond the embedding is let through: text-only models of a multimodal family share its tokenizer,
    /// image tokens included, and the engine refuses such an id when it sees one.
    pub fn check_fits(&self, model_vocab: usize) -> Result<(), TokenizerError> {
        let beyond = self.vocab_size.saturating_sub(model_vocab);
        let too_large = beyond > EXTRA_ADDED || self.base_size > model_vocab;
        if too_large || self.vocab_size < model_vocab - model_vocab / 10 {
            return Err(TokenizerError::DoesNotFit {
                tokenizer: self.vocab_size,
                model: model_vocab,
            });
        }
        Ok(())
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size)
            .field("bos", &self.bos)
            .field("eos", &self.eos)
            .field("add_bos", &self.add_bos)
            .finish_non_exhaustive()
    }
}

/// Messages of libraries may span lines; ours are one.
pub(crate) fn one_line(message: &str) -> String {
    message.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn id_value(value: &Value) -> Option<u32> {
    u32::try_from(value.as_u64()?).ok()
}

/// A JSON file that may be absent.
pub(crate) fn read_json(path: &Path) -> Result<Option<Value>, TokenizerError> {
    match std::fs::read(path) {
        Ok(text) => serde_json::from_slice(&text)
            .map(Some)
            .map_err(|e| TokenizerError::Invalid {
                origin: path.display().to_string(),
                reason: one_line(&e.to_string()),
            }),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(TokenizerError::Read {
            path: path.into(),
            source,
        }),
    }
}

/// A merge as files write it: "a b" or ["a", "b"].
#[derive(serde::Deserialize)]
#[serde(untagged)]
enum Merge {
    Text(String),
    Pair(String, String),
}

#[derive(serde::Deserialize, Default)]
#[serde(default)]
struct MergesOnly {
    model: MergesModel,
}

#[derive(serde::Deserialize, Default)]
#[serde(default)]
struct MergesModel {
    vocab: Value,
    merges: Vec<Merge>,
}

/// Checks that every merge's parts and result are in the vocabulary: the library indexes a buffer by them unchecked.
fn check_merges(text: &[u8]) -> Result<(), String> {
    let file: MergesOnly = serde_json::from_slice(text).map_err(|e| e.to_string())?;
    let Value::Object(vocab) = &file.model.vocab else {
        return Ok(()); // Unigram vocabularies are lists and have no merges.
    };
    for merge in &file.model.merges {
        let (a, b) = match merge {
            Merge::Pair(a, b) => (a.as_str(), b.as_str()),
            Merge::Text(line) if line.starts_with("#version") => continue,
            Merge::Text(line) => line
                .split_once(' ')
                .ok_or_else(|| format!("merge '{line}' is not two tokens"))?,
        };
        check_merge(a, b, |token| vocab.contains_key(token))?;
    }
    Ok(())
}

/// Checks one merge against a vocabulary.
pub(crate) fn check_merge(a: &str, b: &str, known: impl Fn(&str) -> bool) -> Result<(), String> {
    let whole = format!("{a}{b}");
    match [a, b, &whole].into_iter().find(|token| !known(token)) {
        Some(missing) => Err(format!(
            "merge '{a} {b}' needs token '{missing}', which the vocabulary lacks"
        )),
        None => Ok(()),
    }
}
