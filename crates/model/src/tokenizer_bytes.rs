//! Byte-level vocabularies: each token stands for a string of bytes, and text is put together from those.

use crate::tokenizer::Tokenizer;

/// Every token's bytes in one buffer; token i is `data[starts[i]..starts[i + 1]]`.
pub(crate) struct ByteTable {
    data: Vec<u8>,
    starts: Vec<u32>,
}

impl ByteTable {
    /// A table of `size` tokens from (id, content, added). Added tokens are plain text; others spell each byte as the
    /// character GPT-2 gave it, and are plain text too where they hold any other character. Ids nobody names are empty.
    pub(crate) fn new<'a>(size: usize, tokens: impl Iterator<Item = (u32, &'a str, bool)>) -> Self {
        let mut by_id: Vec<(&str, bool)> = vec![("", true); size];
        for (id, content, added) in tokens {
            by_id[id as usize] = (content, added);
        }
        let mut table = Self {
            data: Vec::new(),
            starts: vec![0],
        };
        for (content, added) in by_id {
            let start = table.data.len();
            let spelled = !added
                && content
                    .chars()
                    .all(|c| byte_of(c).map(|b| table.data.push(b)).is_some());
            if !spelled {
                table.data.truncate(start);
                table.data.extend_from_slice(content.as_bytes());
            }
            table.starts.push(table.data.len() as u32);
        }
        table
    }

    /// Bytes of a token; none for an id outside the table.
    pub(crate) fn get(&self, id: u32) -> &[u8] {
        let id = id as usize;
        match (self.starts.get(id), self.starts.get(id + 1)) {
            (Some(&start), Some(&end)) => &self.data[start as usize..end as usize],
            _ => &[],
        }
    }
}

/// The byte a character stands for in GPT-2's alphabet: printable Latin-1 stands for itself, the other 68 bytes in
/// ascending order for U+0100 onwards.
fn byte_of(c: char) -> Option<u8> {
    Some(match u32::from(c) {
        code @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => code as u8,
        code @ 0x100..=0x120 => (code - 0x100) as u8,
        code @ 0x121..=0x142 => (code - 0x121 + 0x7f) as u8,
        0x143 => 0xad,
        _ => return None,
    })
}

/// Decodes a growing sequence of tokens into text that is always whole UTF-8: a character split between tokens is held
/// back until it is complete. The parts together equal [`Tokenizer::decode`] of the whole.
#[derive(Debug, Default, Clone)]
pub struct StreamDecoder {
    skip_special: bool,
    /// Byte-level tokenizers: bytes of an unfinished character.
    pending: Vec<u8>,
    /// Others: the latest tokens, and how much of their text was given out.
    window: Vec<u32>,
    given: usize,
}

/// Tokens after which the window of a tokenizer that is not byte-level is cut, and to how many.
const WINDOW: (usize, usize) = (64, 16);

impl StreamDecoder {
    /// A decoder at the start of a text; `skip_special` as in [`Tokenizer::decode`].
    pub fn new(skip_special: bool) -> Self {
        Self {
            skip_special,
            ..Self::default()
        }
    }

    /// Adds a token and returns the text that is now certain, often empty.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> String {
        if self.skip_special && tokenizer.is_special(id) {
            return String::new();
        }
        match tokenizer.token_bytes(id) {
            Some(bytes) => {
                self.pending.extend_from_slice(bytes);
                take_whole(&mut self.pending)
            }
            None => self.push_windowed(tokenizer, id),
        }
    }

    /// Ends the text: an unfinished character becomes U+FFFD.
    pub fn finish(mut self, tokenizer: &Tokenizer) -> String {
        if !self.pending.is_empty() {
            return String::from_utf8_lossy(&std::mem::take(&mut self.pending)).into_owned();
        }
        let text = tokenizer.decode(&self.window, self.skip_special);
        text.get(self.given..).unwrap_or_default().to_owned()
    }

    /// Decodes the window anew and gives out what follows the part given before, short of trailing U+FFFD, which the
    /// next token may complete.
    fn push_windowed(&mut self, tokenizer: &Tokenizer, id: u32) -> String {
        self.window.push(id);
        let text = tokenizer.decode(&self.window, self.skip_special);
        let certain = text.trim_end_matches('\u{fffd}');
        let new = certain.get(self.given..).unwrap_or_default().to_owned();
        self.given = self.given.max(certain.len());
        if self.window.len() >= WINDOW.0 && certain.len() == text.len() {
            self.window.drain(..self.window.len() - WINDOW.1);
            self.given = tokenizer.decode(&self.window, self.skip_special).len();
        }
        new
    }
}

/// Takes the longest front part of `pending` whose meaning no further byte can change, with U+FFFD where
/// [`String::from_utf8_lossy`] puts it.
fn take_whole(pending: &mut Vec<u8>) -> String {
    let mut text = String::new();
    let mut done = 0;
    loop {
        match std::str::from_utf8(&pending[done..]) {
            Ok(rest) => {
                text.push_str(rest);
                done = pending.len();
                break;
            }
            Err(e) => {
                let valid = &pending[done..done + e.valid_up_to()];
                text.push_str(&String::from_utf8_lossy(valid));
                done += e.valid_up_to();
                match e.error_len() {
                    Some(bad) => {
                        text.push('\u{fffd}');
                        done += bad;
                    }
                    None => break, // An unfinished character at the end.
                }
            }
        }
    }
    pending.drain(..done);
    text
}
