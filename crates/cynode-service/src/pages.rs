//! Pages of lists, bounded in bytes as well as in items.

/// The largest page, as JSON. A single item may be larger: its fields have their own bounds.
pub const MAX_PAGE_BYTES: usize = 1024 * 1024;

/// Collects the items of a page up to the requested count and the maximum size.
#[derive(Debug)]
pub struct PageBuilder<T> {
    items: Vec<T>,
    limit: usize,
    bytes: usize,
}

impl<T> PageBuilder<T> {
    pub const fn new(limit: usize) -> Self {
        Self {
            items: Vec::new(),
            limit,
            bytes: 0,
        }
    }

    /// Adds an item of this size. False if it belongs to the next page.
    pub fn add(&mut self, item: T, size: usize) -> bool {
        let has_room = self.items.len() < self.limit
            && (self.items.is_empty() || self.bytes + size <= MAX_PAGE_BYTES);
        if has_room {
            self.bytes += size;
            self.items.push(item);
        }
        has_room
    }

    /// The number of items still missing.
    pub const fn left(&self) -> usize {
        self.limit - self.items.len()
    }

    pub fn into_items(self) -> Vec<T> {
        self.items
    }
}

/// The length of a value as JSON.
pub fn json_size(value: &impl serde::Serialize) -> usize {
    struct Counter(usize);
    impl std::io::Write for Counter {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut counter = Counter(0);
    // A value that can't be serialized is never sent.
    serde_json::to_writer(&mut counter, value).map_or(0, |()| counter.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_takes_items_up_to_its_count_and_its_bytes_and_at_least_one() {
        let taken = |limit: usize, sizes: &[usize]| {
            let mut page = PageBuilder::new(limit);
            sizes
                .iter()
                .take_while(|size| page.add(**size, **size))
                .count()
        };
        assert_eq!(taken(3, &[1; 5]), 3);
        assert_eq!(taken(9, &[MAX_PAGE_BYTES / 2, MAX_PAGE_BYTES / 2, 1]), 2);
        assert_eq!(
            taken(9, &[MAX_PAGE_BYTES / 2, MAX_PAGE_BYTES / 2 + 1, 1]),
            1
        );
        assert_eq!(taken(9, &[2 * MAX_PAGE_BYTES, 1]), 1);
    }

    #[test]
    fn the_computed_size_is_that_of_the_json_text() {
        for value in [
            serde_json::json!({"a": ["\u{1}", "ü", 1.5, null]}),
            serde_json::json!("x".repeat(10_000)),
        ] {
            assert_eq!(json_size(&value), value.to_string().len());
        }
    }
}
