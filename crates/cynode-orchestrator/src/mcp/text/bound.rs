//! Shortens structured results to the size of the text. What is shortened says so: `truncated`.

use serde_json::{Value, json};

use super::CONTINUATION;
use crate::shorten::{cut, json_size};

/// Lists that are shortened to fit.
const LISTS: [&str; 7] = [
    "entries", "matches", "files", "rejects", "flagged", "items", "repaired",
];
/// Texts that are shortened to fit, and whether their ends matter as much as their beginnings.
const TEXTS: [(&str, bool); 5] = [
    ("stdout", true),
    ("stderr", true),
    ("content", false),
    ("content_b64", false),
    ("text", false),
];

pub(super) fn shorten(result: &mut Value, limit: usize) {
    shorten_page(result, limit);
    let mut total = json_size(result);
    for name in LISTS {
        let Some(items) = result.get_mut(name).and_then(Value::as_array_mut) else {
            continue;
        };
        let before = items.len();
        while total > limit
            && let Some(item) = items.pop()
        {
            total = total.saturating_sub(json_size(&item) + 1);
        }
        if items.len() < before {
            result["truncated"] = json!(true);
        }
    }
    // Room for the members that tell what was shortened.
    let excess = total.saturating_sub(limit.saturating_sub(64));
    if total > limit {
        shorten_texts(result, excess);
    }
}

/// Cuts the longest text, then the next, until so many bytes are gone.
fn shorten_texts(result: &mut Value, mut excess: usize) {
    let is_base64 = result["encoding"] == "base64";
    let size = |result: &Value, name: &str| result.get(name).map_or(0, json_size);
    let mut texts = TEXTS.map(|(name, keeps_end)| (size(result, name), name, keeps_end));
    texts.sort_unstable_by_key(|(size, ..)| std::cmp::Reverse(*size));
    let second = texts[1].0;
    for (number, (size, name, keeps_end)) in texts.into_iter().enumerate() {
        let Some(Value::String(text)) = result.get_mut(name).filter(|_| excess > 0) else {
            continue;
        };
        // Two long streams share what is cut.
        let share = if number == 0 && size < second.saturating_mul(2) {
            excess.div_ceil(2)
        } else {
            excess
        };
        let room = size.saturating_sub(2 + share);
        *text = cut(text, room, keeps_end, is_base64 || name.ends_with("_b64"));
        let now = json_size(&result[name]);
        excess = excess.saturating_sub(size.saturating_sub(now));
        if keeps_end {
            if !result["truncated"].is_object() {
                result["truncated"] = json!({});
            }
            result["truncated"][name] = json!(true);
        } else {
            result["truncated"] = json!(true);
        }
    }
}

/// Shortens a page of output to whole chunks; only the first may be cut. The page then ends at the
/// last one.
fn shorten_page(result: &mut Value, limit: usize) {
    let Some(chunks) = result.get_mut("chunks").and_then(Value::as_array_mut) else {
        return;
    };
    let room = limit.saturating_sub(CONTINUATION);
    let (mut bytes, before) = (0, chunks.len());
    let fits = chunks
        .iter()
        .take_while(|chunk| {
            bytes += json_size(chunk) + 1;
            bytes <= room
        })
        .count();
    chunks.truncate(fits.max(1));
    if fits == 0
        && let Some(chunk) = chunks.first_mut().and_then(Value::as_object_mut)
    {
        for (name, is_base64) in [("data", false), ("data_b64", true)] {
            if let Some(Value::String(data)) = chunk.get_mut(name) {
                *data = cut(data, room, false, is_base64);
            }
        }
        chunk.insert("truncated".to_owned(), json!(true));
    }
    let last = chunks.last().map(|chunk| chunk["seq"].clone());
    if chunks.len() < before
        && let (Some(last), Some(page)) = (last, result.as_object_mut())
    {
        page.insert("next_seq".to_owned(), last);
        page.remove("exit");
    }
}

#[cfg(test)]
mod tests {
    use base64::{Engine as _, engine::general_purpose::STANDARD};

    use super::*;

    const LIMIT: usize = 8_192;

    fn shortened(mut result: Value) -> Value {
        shorten(&mut result, LIMIT);
        assert!(json_size(&result) <= LIMIT, "{}", json_size(&result));
        result
    }

    #[test]
    fn texts_are_cut_by_their_size_as_json() {
        for letter in ["a", "\n", "\u{1}", "\"", "é", "🦀"] {
            let content = letter.repeat(7_168);
            let file = json!({"content": content, "sha256": "x", "size": 1, "truncated": false});
            let fits = json_size(&file) <= LIMIT;
            if fits {
                continue;
            }
            let file = shortened(file);
            let kept = file["content"].as_str().expect("a text");
            assert!(content.starts_with(kept) && !kept.is_empty());
            assert!(
                json_size(&file) > LIMIT - 200,
                "{letter:?}: too much was cut"
            );
            assert_eq!(file["truncated"], true);
        }
    }

    #[test]
    fn binary_content_stays_decodable() {
        let bytes: Vec<u8> = (0..=255).cycle().take(7_168).collect();
        let file = shortened(json!({"content_b64": STANDARD.encode(&bytes), "truncated": false}));
        let kept = STANDARD
            .decode(file["content_b64"].as_str().expect("a text"))
            .expect("base64");
        assert!(bytes.starts_with(&kept) && kept.len() > 5_000);
    }

    #[test]
    fn streams_keep_their_ends_and_share_the_room() {
        let stream = |letter: &str| format!("begin{}end", letter.repeat(3_000));
        let both = json!({
            "exit_code": 0, "encoding": "utf-8", "stdout": stream("\n"), "stderr": stream("\t"),
            "truncated": {"stdout": false, "stderr": false},
        });
        let both = shortened(both);
        for name in ["stdout", "stderr"] {
            let kept = both[name].as_str().expect("a text");
            assert!(kept.starts_with("begin") && kept.ends_with("end"), "{name}");
            assert!(kept.len() > 1_500, "{name}: {}", kept.len());
            assert_eq!(both["truncated"][name], true);
        }
        let bytes = vec![0xff; 3_584];
        let base64 = json!({
            "encoding": "base64", "stdout": STANDARD.encode(&bytes), "stderr": STANDARD.encode(&bytes),
        });
        let base64 = shortened(base64);
        let kept = STANDARD.decode(base64["stdout"].as_str().expect("a text"));
        assert!(kept.is_ok_and(|kept| kept.len() > 2_000));
        let short = json!({"stdout": "x".repeat(9_000), "stderr": "short"});
        let short = shortened(short);
        assert_eq!(
            (&short["stderr"], short["truncated"].get("stderr")),
            (&json!("short"), None)
        );
    }

    #[test]
    fn a_chunk_of_control_characters_is_cut_too() {
        let page = json!({
            "chunks": [{"seq": 1, "stream": "stdout", "data": "\u{1b}".repeat(7_000)}],
            "next_seq": 1,
        });
        assert_eq!(shortened(page)["chunks"][0]["truncated"], true);
    }
}
