//! The tokenizer inside a GGUF file: `tokenizer.ggml.*` metadata, byte-level BPE ("gpt2") vocabularies and SentencePiece's
//! ("llama").
//!
//! Source of the keys: the GGUF specification (ggml, docs/gguf.md). Pre-tokenizers are those of the models' own
//! `tokenizer.json` files, which GGUF only names.

use crate::gguf::{GgufFile, Metadata};
use crate::tokenizer::{MAX_ID, SpecialIds, Tokenizer, TokenizerError, check_merge, one_line};
use crate::tokenizer_spm;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, NormalizerWrapper, PreTokenizerWrapper, SplitDelimiterBehavior};

/// Values of `tokenizer.ggml.token_type` that matter here.
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;

/// How text is cut before merging, named by `tokenizer.ggml.pre`.
struct PreTokenizer {
    name: &'static str,
    /// `None`: single digits, then GPT-2's own pattern.
    pattern: Option<&'static str>,
    /// Text is brought to Unicode NFC first.
    nfc: bool,
    /// A piece that is a token as it stands is not built by merges.
    ignore_merges: bool,
    /// BOS goes first unless the file says otherwise.
    add_bos: bool,
}

const PRE_TOKENIZERS: [PreTokenizer; 3] = [
    PreTokenizer {
        name: "smollm",
        pattern: None,
        nfc: false,
        ignore_merges: false,
        add_bos: false,
    },
    PreTokenizer {
        name: "llama-bpe",
        pattern: Some(concat!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )),
        nfc: false,
        ignore_merges: true,
        add_bos: true,
    },
    PreTokenizer {
        name: "qwen2",
        pattern: Some(concat!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )),
        nfc: true,
        ignore_merges: false,
        add_bos: false,
    },
];

impl Tokenizer {
    /// Reads the tokenizer in a GGUF file's metadata.
    pub fn from_gguf(file: &GgufFile) -> Result<Self, TokenizerError> {
        Self::from_gguf_metadata(&file.metadata)
    }

    /// The same from metadata alone.
    pub fn from_gguf_metadata(metadata: &Metadata) -> Result<Self, TokenizerError> {
        let invalid = |reason: String| TokenizerError::Invalid {
            origin: "the GGUF file".into(),
            reason: one_line(&reason),
        };
        let text = |key: &'static str| match metadata.get_str(key) {
            Ok(Some(value)) => Ok(value),
            Ok(None) => Err(invalid(format!("metadata key \"{key}\" is missing"))),
            Err(e) => Err(invalid(e.to_string())),
        };
        let id = |key: &str| metadata.get_u32(key).map_err(|e| invalid(e.to_string()));
        let strings = |key: &str| match metadata.get_str_array(key) {
            Ok(Some(value)) => Ok(value),
            Ok(None) => Err(invalid(format!("metadata key \"{key}\" is missing"))),
            Err(e) => Err(invalid(e.to_string())),
        };

        let model = text("tokenizer.ggml.model")?;
        if !["gpt2", "llama"].contains(&model) {
            return Err(TokenizerError::Unsupported {
                what: "GGUF tokenizer model",
                given: one_line(model),
                supported: "gpt2, llama",
            });
        }
        let sentence_piece = model == "llama";
        let tokens = strings("tokenizer.ggml.tokens")?;
        if tokens.len() > MAX_ID as usize {
            return Err(invalid(format!(
                "{} tokens are more than the {MAX_ID} allowed",
                tokens.len()
            )));
        }
        let types = metadata
            .get_i32_array("tokenizer.ggml.token_type")
            .map_err(|e| invalid(e.to_string()))?
            .unwrap_or_default();
        let types_fit = |optional: bool| {
            if types.len() == tokens.len() || (optional && types.is_empty()) {
                return Ok(());
            }
            Err(invalid(format!(
                "it has {} tokens but {} token types",
                tokens.len(),
                types.len()
            )))
        };
        if sentence_piece {
            types_fit(false)?;
        }
        let spelled = match sentence_piece {
            true => tokenizer_spm::spelled(tokens, &types),
            false => Vec::new(),
        };
        let tokens = if sentence_piece { &spelled } else { tokens };
        let mut vocab = Vocab::default();
        for (id, token) in tokens.iter().enumerate() {
            if let Some(first) = vocab.insert(token.clone(), id as u32) {
                return Err(invalid(format!(
                    "tokens {first} and {id} are both '{token}'"
                )));
            }
        }
        let (mut inner, add_bos) = if sentence_piece {
            let flag = |key: &str| metadata.get_bool(key).map_err(|e| invalid(e.to_string()));
            // What is put before a text and what of it is left out again on the way back is Llama 2's affair.
            if flag("tokenizer.ggml.add_space_prefix")? != Some(false) {
                return Err(TokenizerError::Unsupported {
                    what: "GGUF tokenizer setting add_space_prefix",
                    given: "true".into(),
                    supported: "false",
                });
            }
            let scores = metadata.get_f32_array("tokenizer.ggml.scores");
            let scores = scores
                .map_err(|e| invalid(e.to_string()))?
                .unwrap_or_default();
            if scores.len() != tokens.len() {
                return Err(invalid(format!(
                    "it has {} tokens but {} scores",
                    tokens.len(),
                    scores.len()
                )));
            }
            let unknown = id("tokenizer.ggml.unknown_token_id")?;
            let unknown = unknown.and_then(|id| tokens.get(id as usize));
            let inner = tokenizer_spm::tokenizer(tokens, vocab, scores, &types, unknown);
            (inner.map_err(invalid)?, true)
        } else {
            let pre = text("tokenizer.ggml.pre")?;
            let pre = PRE_TOKENIZERS
                .iter()
                .find(|p| p.name == pre)
                .ok_or_else(|| TokenizerError::Unsupported {
                    what: "GGUF pre-tokenizer",
                    given: one_line(pre),
                    supported: "smollm, llama-bpe, qwen2",
                })?;
            let merges = strings("tokenizer.ggml.merges")?;
            let inner = byte_level(pre, vocab, merges).map_err(invalid)?;
            types_fit(true)?;
            (inner, pre.add_bos)
        };
        let added = |wanted: i32| {
            tokens
                .iter()
                .zip(&types)
                .filter(move |&(token, &kind)| kind == wanted && !token.is_empty())
                .map(move |(token, _)| {
                    AddedToken::from(token.clone(), wanted == CONTROL).normalized(false)
                })
        };
        inner
            .add_tokens(added(CONTROL).chain(added(USER_DEFINED)))
            .map_err(|e| invalid(e.to_string()))?;

        let mut ids = SpecialIds {
            bos: id("tokenizer.ggml.bos_token_id")?,
            eos: Vec::new(),
            add_bos: metadata
                .get_bool("tokenizer.ggml.add_bos_token")
                .map_err(|e| invalid(e.to_string()))?
                .or(Some(add_bos)),
        };
        for key in ["eos", "eot", "eom"] {
            ids.eos
                .extend(id(&format!("tokenizer.ggml.{key}_token_id"))?);
        }
        for &id in ids.bos.iter().chain(&ids.eos) {
            if id as usize >= tokens.len() {
                return Err(invalid(format!(
                    "it names token {id} as special, but has only {} tokens",
                    tokens.len()
                )));
            }
        }
        Self::build(inner, ids, "the GGUF file")
    }
}

/// A byte-level tokenizer without its added tokens.
fn byte_level(
    pre: &PreTokenizer,
    vocab: Vocab,
    lines: &[String],
) -> Result<tokenizers::Tokenizer, String> {
    let text = |e: tokenizers::Error| e.to_string();
    let mut merges = Vec::new();
    for line in lines {
        let (a, b) = line
            .split_once(' ')
            .ok_or_else(|| format!("merge '{line}' is not two tokens"))?;
        check_merge(a, b, |token| vocab.contains_key(token))?;
        merges.push((a.to_owned(), b.to_owned()));
    }
    let bpe = BPE::builder()
        .vocab_and_merges(vocab, merges)
        .ignore_merges(pre.ignore_merges)
        .build()
        .map_err(text)?;
    let mut inner = tokenizers::Tokenizer::new(bpe);
    if pre.nfc {
        inner
            .with_normalizer(Some(NormalizerWrapper::NFC(NFC)))
            .map_err(text)?;
    }
    inner.with_pre_tokenizer(Some(pre.build().map_err(text)?));
    inner.with_decoder(Some(ByteLevel::new(false, false, false)));
    Ok(inner)
}

impl PreTokenizer {
    fn build(&self) -> tokenizers::Result<PreTokenizerWrapper> {
        let first: PreTokenizerWrapper = match self.pattern {
            None => Digits::new(true).into(),
            Some(pattern) => Split::new(
                SplitPattern::Regex(pattern.into()),
                SplitDelimiterBehavior::Isolated,
                false,
            )?
            .into(),
        };
        let bytes = ByteLevel::new(false, false, self.pattern.is_none());
        Ok(Sequence::new(vec![first, bytes.into()]).into())
    }
}
