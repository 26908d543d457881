//! SentencePiece BPE vocabularies in GGUF files (`tokenizer.ggml.model` = "llama"), such as Gemma's: tokens with scores,
//! no merges. Pieces are joined best score first, which merges made of the scores say too.

use crate::tokenizer::one_line;
use tokenizers::decoders::DecoderWrapper;
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::sequence::Sequence;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::{NormalizerWrapper, Replace};

/// Values of `tokenizer.ggml.token_type`: pieces found in training, and those a person chose.
const NORMAL: i32 = 1;
const USER_DEFINED: i32 = 4;

/// Longest token whose parts are looked for, in characters. The longest of published vocabularies has 93.
const MAX_CHARS: usize = 256;

/// What stands for a space.
const SPACE: &str = "\u{2581}";

/// Tokens as the vocabulary spells them: converters write the spaces of user-defined ones as they are.
pub(crate) fn spelled(tokens: &[String], types: &[i32]) -> Vec<String> {
    let spell = |(token, kind): (&String, &i32)| match *kind {
        USER_DEFINED => token.replace(' ', SPACE),
        _ => token.clone(),
    };
    tokens.iter().zip(types).map(spell).collect()
}

/// A tokenizer without its added tokens. `scores` and `types` are as long as `tokens`; `unknown` is one of them.
pub(crate) fn tokenizer(
    tokens: &[String],
    vocab: Vocab,
    scores: &[f32],
    types: &[i32],
    unknown: Option<&String>,
) -> Result<tokenizers::Tokenizer, String> {
    let merges = merges(tokens, &vocab, scores, types)?;
    let mut bpe = BPE::builder()
        .vocab_and_merges(vocab, merges)
        .fuse_unk(true)
        .byte_fallback(true);
    if let Some(unknown) = unknown {
        bpe = bpe.unk_token(unknown.clone());
    }
    let text = |e: tokenizers::Error| one_line(&e.to_string());
    let mut inner = tokenizers::Tokenizer::new(bpe.build().map_err(text)?);
    let to_mark = Replace::new(" ", SPACE).map_err(text)?;
    let from_mark = Replace::new(SPACE, " ").map_err(text)?;
    inner
        .with_normalizer(Some(NormalizerWrapper::Replace(to_mark)))
        .map_err(text)?;
    inner.with_decoder(Some(Sequence::new(vec![
        DecoderWrapper::Replace(from_mark),
        DecoderWrapper::ByteFallback(ByteFallback::default()),
        DecoderWrapper::Fuse(Fuse::default()),
    ])));
    Ok(inner)
}

/// Every way to cut a token in two, the best tokens' first; of equals the longer left part first. User-defined tokens,
/// whose scores mean nothing, come before all others.
fn merges(
    tokens: &[String],
    vocab: &Vocab,
    scores: &[f32],
    types: &[i32],
) -> Result<Vec<(String, String)>, String> {
    let joins = |id: usize| matches!(types[id], NORMAL | USER_DEFINED);
    let part = |s: &str| vocab.get(s).map(|&id| id as usize).filter(|&id| joins(id));
    let mut found = Vec::new();
    for (id, token) in tokens.iter().enumerate().filter(|(id, _)| joins(*id)) {
        let chars = token.chars().count();
        if chars > MAX_CHARS {
            return Err(format!(
                "token {id} has {chars} characters, more than the {MAX_CHARS} allowed"
            ));
        }
        let score = match types[id] {
            USER_DEFINED => f32::INFINITY,
            _ => scores[id],
        };
        let cuts = token.char_indices().enumerate().skip(1);
        let of_token = found.len();
        for (left_chars, (at, _)) in cuts {
            if let (Some(left), Some(right)) = (part(&token[..at]), part(&token[at..])) {
                found.push((score, left_chars, chars - left_chars, left, right));
            }
        }
        found[of_token..].sort_by_key(|&(_, _, _, left, right)| (left, right));
    }
    found.sort_by(|a, b| b.0.total_cmp(&a.0).then((b.1, b.2).cmp(&(a.1, a.2))));
    Ok(found
        .into_iter()
        .map(|(_, _, _, left, right)| (tokens[left].clone(), tokens[right].clone()))
        .collect())
}
