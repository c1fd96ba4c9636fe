//! Pages of metrics in the text format of Prometheus.

/// Returns the value of a metric without labels, or `None` if the page has no such metric.
pub(super) fn value(page: &str, name: &str) -> Option<f64> {
    page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_metric_is_found_by_its_whole_name() {
        let page = "# TYPE cpu_seconds_total counter\ncpu_seconds_total 1.5e+2\ncpu{a=\"b\"} 3\n";
        assert_eq!(value(page, "cpu_seconds_total"), Some(150.0));
        assert_eq!(value(page, "cpu_seconds"), None);
        assert_eq!(value(page, "cpu"), None);
    }
}
