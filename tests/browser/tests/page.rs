//! The page of the live view in headless Chromium: it shows the figures of the limiter.

mod browser;
#[path = "../../support/mod.rs"]
mod support;
#[path = "../../support/wire.rs"]
mod wire;

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{Router, extract::Request};
use browser::{Page, browse};
use serde_json::{Value, json};
use support::{assert_available, manual};
use tokio::task::JoinHandle;
use tower_tenant::{
    Capacity, Overflow, Permit, TenantLimiter, inspect::Inspect, limiter::TenantLimiterBuilder,
};
use wire::serve;

type Limiter = TenantLimiter<String>;

const MOUNT: &str = "/ops/tenants";
const DESKTOP: (u32, u32) = (1280, 800);
const PHONE: (u32, u32) = (390, 844);

fn limiter() -> Limiter {
    builder().build()
}

fn builder() -> TenantLimiterBuilder<String> {
    TenantLimiter::builder(4)
        .overflow(Overflow::queue(99).max_wait(Duration::MAX))
        .evictor(manual(Duration::from_secs(60)))
        .count_requests()
}

/// Requests in flight and waiting, as long as this is kept.
struct Load {
    _permits: Vec<Permit>,
    waits: Vec<JoinHandle<()>>,
}

impl Load {
    async fn of(limiter: &Limiter, tenants: &[(&str, usize, usize)]) -> Self {
        let mut load = Self {
            _permits: Vec::new(),
            waits: Vec::new(),
        };
        for &(tenant, running, waiting) in tenants {
            let admit = |_| limiter.try_acquire(tenant).unwrap();
            load._permits.extend((0..running).map(admit));
            for _ in 0..waiting {
                let (limiter, tenant) = (limiter.clone(), tenant.to_owned());
                let wait = async move { drop(limiter.acquire(&tenant).await) };
                load.waits.push(tokio::spawn(wait));
            }
            support::until(|| limiter.waiting(tenant) == waiting).await;
        }
        load
    }

    async fn end(self, limiter: &Limiter) {
        for wait in &self.waits {
            wait.abort();
        }
        drop(self);
        support::until(|| limiter.snapshot().waiting + limiter.snapshot().in_flight == 0).await;
        assert_available(limiter, "a tenant".to_owned(), 4, 2);
        // The server may still be letting go of what the page asked for last.
        support::until(|| {
            support::evict_idle_now(limiter);
            limiter.tracked() == 0
        })
        .await;
    }
}

fn view(limiter: &Limiter) -> Inspect<String> {
    Inspect::new(limiter.clone(), |tenant: &String| tenant.clone())
}

/// Serves a view below a path, and returns its address without the last slash.
async fn mount(view: Inspect<String>) -> String {
    let addr = serve(Router::new().nest_service(MOUNT, view)).await;
    format!("http://{addr}{MOUNT}")
}

/// What a cell of the table shows of a tenant, as far as it stands still.
fn expected(limiter: &Limiter) -> Vec<Value> {
    let snapshot = limiter.snapshot();
    let mut rows = snapshot.tenants;
    rows.sort_by(|a, b| b.in_flight.cmp(&a.in_flight).then(a.tenant.cmp(&b.tenant)));
    let cell = |row: &tower_tenant::limiter::snapshot::TenantSnapshot<String>| {
        json!({
            "name": row.tenant,
            "use": format!("{} / {}", row.in_flight, row.limit),
            "filled": (100 * row.in_flight.min(row.limit)).checked_div(row.limit).unwrap_or(0),
            "waiting": row.waiting.to_string(),
            "share": row.share.map_or("–".to_owned(), |share| format!("{share:.1}")),
            "rejected": row.rejected.unwrap().to_string(),
            "paused": row.limit == 0,
        })
    };
    rows.iter().map(cell).collect()
}

const ROWS: &str = "return [...document.querySelectorAll('#rows tr')].map(row => ({
    name: row.querySelector('.name').textContent,
    use: row.querySelector('.count').textContent,
    filled: Math.round(100 * row.querySelector('.bar i').offsetWidth / row.querySelector('.bar').offsetWidth),
    waiting: row.cells[2].textContent,
    share: row.cells[4].textContent,
    rejected: row.cells[7].textContent,
    paused: !row.querySelector('.chip').hidden,
}))";

const NAMES: &str =
    "return [...document.querySelectorAll('#rows .name')].map(name => name.textContent)";

/// Texts whose contrast with what is behind them is below that of WCAG 2.2, level AA.
const FAINT: &str = "
    const parse = color => {
        const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
        canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const light = ([r, g, b]) => [r, g, b].map(c => c / 255)
        .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const ground = node => {
        for (; node; node = node.parentElement) {
            const color = parse(getComputedStyle(node).backgroundColor);
            if (color[3] === 255) return color;
        }
        return [255, 255, 255];
    };
    const faint = [];
    const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
        const node = walk.currentNode.parentElement;
        if (!walk.currentNode.data.trim() || !node.checkVisibility() || node.tagName === 'SCRIPT') continue;
        const [a, b] = [light(parse(getComputedStyle(node).color)), light(ground(node))];
        const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (contrast < 4.5) faint.push(`${walk.currentNode.data}: ${contrast.toFixed(2)}`);
    }
    return faint";

#[tokio::test(flavor = "multi_thread")]
async fn the_page_shows_the_figures_of_the_limiter_on_desktop_and_phone_light_and_dark() {
    let limiter = builder().capacity(Capacity::new(12)).build();
    limiter.set_limit("wide", 8);
    drop(limiter.try_acquire("paused"));
    limiter.set_limit("paused", 0);
    let load = [
        ("acme", 4, 7),
        ("wide", 2, 0),
        ("zenith", 1, 0),
        ("a-rather-long-tenant-name-that-has-to-be-cut", 1, 0),
    ];
    let load = Load::of(&limiter, &load).await;
    limiter.try_acquire("acme").unwrap_err();
    limiter.try_acquire("paused").unwrap_err();

    browse(&mount(view(&limiter)).await, async |page| {
        let mut grounds = Vec::new();
        for (size, scheme) in [
            (DESKTOP, "light"),
            (DESKTOP, "dark"),
            (PHONE, "light"),
            (PHONE, "dark"),
        ] {
            page.emulate(size, scheme).await;
            page.reload().await;
            page.until_eq(ROWS, json!(expected(&limiter))).await;
            assert_eq!(page.text("#in-flight").await, "8");
            assert_eq!(page.text("#capacity").await, "of 12");
            assert_eq!(page.text("#waiting").await, "7");
            assert_eq!(page.text("#tracked").await, "5");
            assert_eq!(page.text("#mode").await, "read only");
            assert_eq!(page.text("#shown").await, "5 tenants");
            let case = format!("{size:?} {scheme}");
            page.shoot(&format!("{} {scheme}", size.0)).await;
            let wider = "return document.documentElement.scrollWidth - innerWidth";
            assert!(
                page.run(wider).await.as_i64().unwrap() <= 0,
                "it scrolls sideways: {case}"
            );
            assert_eq!(page.run("return innerWidth").await, size.0);
            assert_eq!(page.run(FAINT).await, json!([]), "{case}");
            grounds.push(
                page.run("return getComputedStyle(document.documentElement).backgroundColor")
                    .await,
            );
        }
        assert_ne!(grounds[0], grounds[1], "dark is not light");
    })
    .await;
    load.end(&limiter).await;
}

/// The heading that sorts, and how.
const SORTED: &str = "return [...document.querySelectorAll('th[aria-sort]')]
    .map(head => [head.textContent, head.getAttribute('aria-sort')])";
const FOCUS: &str = "return document.activeElement.textContent || document.activeElement.id";

/// Goes to what is called so, key by key; whatever has the focus shows it.
async fn tab_to(page: &Page, key: &str, what: &str) {
    for _ in 0..30 {
        page.press(key).await;
        let outline = "return getComputedStyle(document.activeElement).outlineStyle";
        let focus = page.run(FOCUS).await;
        assert_eq!(page.run(outline).await, "solid", "{focus} shows no focus");
        if focus == what {
            return;
        }
    }
    panic!("{what} is not reached by keys");
}

#[tokio::test(flavor = "multi_thread")]
async fn all_of_the_page_is_reached_by_keys() {
    let limiter = limiter();
    let load = Load::of(
        &limiter,
        &[("a", 4, 1), ("b", 4, 3), ("c", 1, 0), ("d", 4, 2)],
    )
    .await;
    browse(&mount(view(&limiter).writable()).await, async |page| {
        page.until_eq(NAMES, json!(["a", "b", "d", "c"])).await;
        assert_eq!(
            page.run(SORTED).await,
            json!([["In flight / limit", "descending"]])
        );
        tab_to(page, Page::TAB, "Waiting").await;
        page.press(Page::ENTER).await;
        page.until_eq(NAMES, json!(["b", "d", "a", "c"])).await;
        assert_eq!(page.run(SORTED).await, json!([["Waiting", "descending"]]));
        page.press(Page::ENTER).await;
        page.until_eq(NAMES, json!(["c", "a", "d", "b"])).await;
        assert_eq!(page.run(SORTED).await, json!([["Waiting", "ascending"]]));

        tab_to(page, Page::SHIFT_TAB, "Tenant").await;
        page.press(Page::ENTER).await;
        page.until_eq(NAMES, json!(["a", "b", "c", "d"])).await;
        tab_to(page, Page::SHIFT_TAB, "search").await;
        page.press("B").await;
        page.until_eq(NAMES, json!(["b"])).await;
        assert_eq!(page.text("#shown").await, "1 of 4 tenants match");
        page.press(Page::BACKSPACE).await;
        page.until_eq(NAMES, json!(["a", "b", "c", "d"])).await;

        // A row that has the focus keeps it, and its place.
        tab_to(page, Page::TAB, "b").await;
        let newcomer = limiter.try_acquire("a newcomer").unwrap();
        page.until_eq(NAMES, json!(["a", "b", "c", "d", "a newcomer"]))
            .await;
        assert_eq!(page.run(FOCUS).await, "b");
        drop(newcomer);
        page.press(Page::ENTER).await;
        page.until_eq("return document.querySelector('dialog').open", json!(true))
            .await;
        tab_to(page, Page::TAB, "Pause: reject its new and queued requests").await;
        page.press(Page::ENTER).await;
        page.until_eq(
            "return document.getElementById('outcome').textContent",
            json!("Done."),
        )
        .await;
        assert_eq!(
            limiter.stats("b").map(|stats| (stats.limit, stats.waiting)),
            Some((0, 0))
        );
        page.press(Page::ESCAPE).await;
        page.until_eq("return document.querySelector('dialog').open", json!(false))
            .await;
        assert_eq!(page.run(FOCUS).await, "b");
    })
    .await;
    load.end(&limiter).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ids_are_text_whatever_is_in_them() {
    let limiter = limiter();
    let long = "<b>é</b>".repeat(1 << 17);
    let mut ids = vec![
        "<img src=x onerror=\"window.struck=1\">",
        "</script><script>window.struck=1</script>",
        "\"'`${window.struck=1}",
        "{{constructor.constructor('window.struck=1')()}}",
        "javascript:window.struck=1",
        "two  spaces",
        "\u{5d0}\u{5d1}\u{5d2}",
        &long,
    ];
    let load = ids.iter().map(|id| (*id, 1, 0)).collect::<Vec<_>>();
    let load = Load::of(&limiter, &load).await;
    ids.sort_unstable();
    browse(&mount(view(&limiter).writable()).await, async |page| {
        page.emulate(PHONE, "light").await;
        page.until_eq("return document.querySelectorAll('#rows tr').length", json!(ids.len())).await;
        let shown = page.run(NAMES).await;
        for id in &ids {
            let names: Vec<_> = shown.as_array().unwrap().iter().filter_map(Value::as_str).collect();
            if *id == long {
                let cut: String = long.chars().take(256).collect();
                let name = names.iter().find(|name| name.starts_with(&cut)).unwrap();
                assert_eq!(name.chars().count(), 256 + 2 + 16, "cut, and an id");
            } else {
                assert!(names.contains(id), "{id:?}");
            }
        }
        for n in 0..ids.len() {
            page.run(&format!("document.querySelectorAll('#rows .name')[{n}].click()")).await;
            let title = page.run("return document.getElementById('who').textContent").await;
            assert_eq!(title, shown[n]);
            page.run("document.querySelector('dialog').close()").await;
        }
        page.run("document.getElementById('search').value = '<img'; document.getElementById('search').dispatchEvent(new Event('input'))").await;
        page.until_eq(NAMES, json!([ids.iter().find(|id| id.starts_with("<img")).unwrap()])).await;
        assert_eq!(page.run("return window.struck ?? null").await, Value::Null);
        assert_eq!(page.run("return document.querySelectorAll('img, b, body script + script').length").await, 0);
        let wider = "return document.documentElement.scrollWidth - innerWidth";
        assert!(page.run(wider).await.as_i64().unwrap() <= 0);
    })
    .await;
    load.end(&limiter).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_writable_page_sets_limits_pauses_and_resumes() {
    let limiter = limiter();
    let load = Load::of(&limiter, &[("acme", 2, 0), ("</b>", 1, 0)]).await;
    browse(&mount(view(&limiter).writable()).await, async |page| {
        for tenant in ["acme", "</b>"] {
            let limit = || limiter.stats(tenant).unwrap().limit;
            page.until_eq("return document.querySelectorAll('#rows tr').length", json!(2)).await;
            let find = format!("[...document.querySelectorAll('#rows .name')].find(name => name.textContent === {})", json!(tenant));
            page.run(&format!("{find}.click()")).await;
            page.run("document.getElementById('limit').value = 7").await;
            page.click("#set button").await;
            page.until(async || limit() == 7).await;
            page.click("#pause").await;
            page.until(async || limit() == 0).await;
            page.until_eq(&format!("return {find}.nextSibling.hidden"), json!(false)).await;
            page.until_eq("return document.getElementById('pause').textContent", json!("Resume")).await;
            page.click("#pause").await;
            page.until(async || limit() == 7).await;
            page.run("document.getElementById('limit').value = 9").await;
            page.click("#set button").await;
            page.until(async || limit() == 9).await;
            page.click("#clear").await;
            page.until(async || limit() == 4).await;
            // One that is opened as soon as another was closed can be changed, too.
            page.run(&format!(
                "document.getElementById('close').click(); {find}.click()"
            ))
            .await;
            page.click("#pause").await;
            page.until(async || limit() == 0).await;
            limiter.resume(tenant);
            page.click("#close").await;
        }
    })
    .await;
    load.end(&limiter).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_that_is_read_only_offers_no_change_and_one_below_a_slash_works_too() {
    let limiter = limiter();
    let load = Load::of(&limiter, &[("acme", 2, 0)]).await;
    browse(&format!("{}/", mount(view(&limiter)).await), async |page| {
        page.until_eq(NAMES, json!(["acme"])).await;
        page.click("#rows .name").await;
        page.until_eq("return document.querySelector('dialog').open", json!(true))
            .await;
        let offered = "return document.getElementById('change').checkVisibility()";
        assert_eq!(page.run(offered).await, false);
        let facts = page
            .run("return document.getElementById('details').innerText")
            .await;
        assert!(facts.as_str().unwrap().contains("2 of 4"), "{facts}");
    })
    .await;
    load.end(&limiter).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rejections_show_as_a_rate_while_they_go_on() {
    let limiter = limiter();
    let load = Load::of(&limiter, &[("acme", 4, 0), ("quiet", 1, 0)]).await;
    browse(&mount(view(&limiter)).await, async |page| {
        let rates = "return [...document.querySelectorAll('#rows tr')].map(row => row.cells[6].textContent)";
        page.until_eq(rates, json!(["0", "0"])).await;
        let mut rejected = 0;
        page.until(async || {
            limiter.try_acquire("acme").unwrap_err();
            rejected += 1;
            let rates = page.run(rates).await;
            rates[0] != "0" && rates[1] == "0" && page.text("#rejected").await != "0"
        })
        .await;
        page.until_eq(rates, json!(["0", "0"])).await;
        let total = "return document.querySelector('#rows tr').cells[7].textContent";
        assert_eq!(page.run(total).await, json!(rejected.to_string()));
        let path = "return document.querySelector('#rejections .rejected').getAttribute('d').split('L').length > 2";
        assert_eq!(page.run(path).await, true);
    })
    .await;
    load.end(&limiter).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_shows_that_the_server_is_away_and_goes_on_when_it_is_back() {
    let limiter = limiter();
    let load = Load::of(&limiter, &[("acme", 2, 0)]).await;
    let app = Router::new().nest_service(MOUNT, view(&limiter));
    let (listener, addr) = wire::listen().await;
    let server = tokio::spawn(axum::serve(listener, app.clone()).into_future());
    browse(&format!("http://{addr}{MOUNT}"), async |page| {
        page.until_eq(NAMES, json!(["acme"])).await;
        let trouble = "return document.getElementById('trouble').checkVisibility()";
        assert_eq!(page.run(trouble).await, false);
        server.abort();
        // Connections that are open would be served on.
        page.block(true).await;
        page.until_eq(trouble, json!(true)).await;
        let text = page.text("#trouble").await;
        assert!(
            text.starts_with("The server does not respond. Last update: "),
            "{text}"
        );
        assert_eq!(
            page.run(NAMES).await,
            json!(["acme"]),
            "the last figures stay"
        );
        assert_eq!(page.run(FAINT).await, json!([]));

        page.block(false).await;
        let listener = tokio::net::TcpListener::bind(addr).await.unwrap();
        tokio::spawn(axum::serve(listener, app).into_future());
        page.until_eq(trouble, json!(false)).await;
    })
    .await;
    load.end(&limiter).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hidden_page_asks_for_nothing() {
    let limiter = limiter();
    let load = Load::of(&limiter, &[("acme", 2, 0)]).await;
    browse(&mount(view(&limiter)).await, async |page| {
        page.wait_for_answers(1).await;
        let hide = |hidden: bool| format!(
            "Object.defineProperty(document, 'hidden', {{ configurable: true, get: () => {hidden} }});
             document.dispatchEvent(new Event('visibilitychange'))"
        );
        page.run(&hide(true)).await;
        // An answer may be on its way.
        tokio::time::sleep(Duration::from_millis(300)).await;
        let before = page.answers().await;
        tokio::time::sleep(Duration::from_millis(1_700)).await;
        assert_eq!(page.answers().await, before);
        page.run(&hide(false)).await;
        page.wait_for_answers(1).await;
    })
    .await;
    load.end(&limiter).await;
}

/// What is marked in a name, and what is said of the mark.
const MARKS: &str = "return [...document.querySelectorAll('#rows .name')].map(name =>
    [name.textContent, [...name.querySelectorAll('.mark')].map(mark => mark.textContent)])";

#[tokio::test(flavor = "multi_thread")]
async fn characters_that_are_not_seen_or_turn_text_around_are_marked_by_their_codes() {
    let names = [
        ("acme", "acme", vec![]),
        ("acme\u{200b}", "acmeU+200B", vec!["U+200B"]),
        (" acme ", "U+0020acmeU+0020", vec!["U+0020", "U+0020"]),
        ("ac\u{ad}me", "acU+00ADme", vec!["U+00AD"]),
        ("ac\u{a0}me", "acU+00A0me", vec!["U+00A0"]),
        (
            "\u{202e}emca\u{202c}",
            "U+202EemcaU+202C",
            vec!["U+202E", "U+202C"],
        ),
        (
            "\u{2066}a\u{2069}\u{200f}",
            "U+2066aU+2069 U+200F",
            vec!["U+2066", "U+2069 U+200F"],
        ),
        (
            "a\u{0}\n\t\u{1b}b",
            "aU+0000 U+000A U+0009 U+001Bb",
            vec!["U+0000 U+000A U+0009 U+001B"],
        ),
        (
            "\u{3164}\u{2800}\u{feff}",
            "U+3164 U+2800 U+FEFF",
            vec!["U+3164 U+2800 U+FEFF"],
        ),
        ("\u{e0041}a", "U+E0041a", vec!["U+E0041"]),
        ("", "empty", vec!["empty"]),
        ("empty", "empty", vec![]),
        ("U+200B", "U+200B", vec![]),
        ("a b  c", "a b  c", vec![]),
        ("\u{5d0}\u{5d1}", "\u{5d0}\u{5d1}", vec![]),
    ];
    let limiter = limiter();
    let load = names
        .iter()
        .map(|(name, ..)| (*name, 1, 0))
        .collect::<Vec<_>>();
    let load = Load::of(&limiter, &load).await;
    let mut expected: Vec<_> = names
        .iter()
        .map(|(_, shown, marks)| json!([shown, marks]))
        .collect();
    expected.sort_by_key(Value::to_string);
    browse(&mount(view(&limiter)).await, async |page| {
        page.until_eq("return document.querySelectorAll('#rows tr').length", json!(names.len())).await;
        let mut shown = page.run(MARKS).await.as_array().unwrap().clone();
        shown.sort_by_key(Value::to_string);
        assert_eq!(shown, expected);
        page.shoot("marks").await;
        assert_eq!(page.run(FAINT).await, json!([]));
        let style = "const mark = document.querySelector('.mark');
            return [mark.title !== '', getComputedStyle(mark).borderTopStyle, getComputedStyle(mark).unicodeBidi]";
        assert_eq!(page.run(style).await, json!([true, "solid", "isolate"]));
        // The same in the details, and the JSON is unharmed.
        let details = "[...document.querySelectorAll('#rows .name')].find(name => name.textContent.includes('U+202E')).click();
            return document.getElementById('who').innerHTML.includes('U+202E')";
        assert_eq!(page.run(details).await, true);
        let script = "return fetch('/ops/tenants/snapshot.json').then(answer => answer.json()).then(json => json.tenants.map(row => row.tenant.name))";
        let listed = page.run(script).await;
        for (name, ..) in &names {
            assert!(listed.as_array().unwrap().contains(&json!(name)), "{name:?}");
        }
    })
    .await;
    load.end(&limiter).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_of_several_alphabets_is_marked_so() {
    let limiter = limiter();
    let mixed = ["p\u{430}ypal", "\u{391}cme"];
    let plain = [
        "paypal",
        "\u{43c}\u{438}\u{440}",
        "ünï-7",
        "\u{65e5}\u{672c} shop",
    ];
    let load = mixed
        .iter()
        .chain(&plain)
        .map(|name| (*name, 1, 0))
        .collect::<Vec<_>>();
    let load = Load::of(&limiter, &load).await;
    browse(&mount(view(&limiter)).await, async |page| {
        page.until_eq("return document.querySelectorAll('#rows tr').length", json!(6)).await;
        let marked = "return [...document.querySelectorAll('#rows tr')]
            .filter(row => [...row.querySelectorAll('.chip')].some(chip => chip.textContent === 'mixed alphabets' && chip.checkVisibility()))
            .map(row => row.querySelector('.name').textContent).sort()";
        let mut expected = mixed;
        expected.sort_unstable();
        assert_eq!(page.run(marked).await, json!(expected));
    })
    .await;
    load.end(&limiter).await;
}

/// The rows that are marked as of a dry run.
const DRY: &str = "return [...document.querySelectorAll('#rows tr')]
    .filter(row => row.querySelector('.chip.dry').checkVisibility())
    .map(row => row.querySelector('.name').textContent).sort()";

#[tokio::test(flavor = "multi_thread")]
async fn the_page_shows_a_dry_run_of_all_and_of_one() {
    let limiter = limiter();
    let load = Load::of(
        &limiter,
        &[("acme", 2, 0), ("meant", 1, 0), ("zenith", 1, 0)],
    )
    .await;
    browse(&mount(view(&limiter).writable()).await, async |page| {
        let banner = "return document.getElementById('dry').checkVisibility()";
        page.until_eq(NAMES, json!(["acme", "meant", "zenith"]))
            .await;
        assert_eq!(
            (page.run(banner).await, page.run(DRY).await),
            (json!(false), json!([]))
        );

        limiter.set_tenant_dry_run("zenith", true);
        page.until_eq(DRY, json!(["zenith"])).await;
        assert_eq!(page.run(banner).await, false);
        limiter.set_tenant_dry_run("meant", false);
        limiter.set_dry_run(true);
        page.until_eq(DRY, json!(["acme", "zenith"])).await;
        assert_eq!(page.run(banner).await, true);
        assert_eq!(page.run(FAINT).await, json!([]));
        page.shoot("dry run").await;

        page.click("#rows .name").await;
        page.click("#pause").await;
        page.until(async || page.text("#outcome").await.contains("dry run"))
            .await;
        drop(limiter.try_acquire("acme").unwrap());
        let counted =
            "return document.getElementById('anonymous').textContent.includes('dry run: 1.')";
        page.until_eq(counted, json!(true)).await;

        limiter.resume("acme");
        limiter.clear_tenant_dry_run("zenith");
        limiter.set_dry_run(false);
        page.until_eq(DRY, json!([])).await;
        assert_eq!(page.run(banner).await, false);
    })
    .await;
    load.end(&limiter).await;
}

/// A view beside a page of its own origin, and how many requests reach the view.
async fn with_neighbour(
    limiter: &Limiter,
) -> (std::net::SocketAddr, Arc<AtomicUsize>, Arc<AtomicUsize>) {
    let (asked, named) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (count, names) = (Arc::clone(&asked), Arc::clone(&named));
    let view = Inspect::new(limiter.clone(), move |tenant: &String| {
        names.fetch_add(1, Ordering::SeqCst);
        tenant.clone()
    });
    let count = axum::middleware::map_request(move |req: Request| {
        // A browser asks for an icon, too.
        let is_of_view = req.uri().path().starts_with(MOUNT);
        count.fetch_add(is_of_view.into(), Ordering::SeqCst);
        async move { req }
    });
    let page =
        || async { axum::response::Html("<!doctype html><title>another site</title><body>") };
    let app = Router::new()
        .nest_service(MOUNT, view.writable())
        .layer(count)
        .route("/elsewhere", axum::routing::get(page));
    (serve(app).await, asked, named)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_site_whose_name_was_made_to_lead_here_sees_and_changes_nothing() {
    let limiter = limiter();
    let load = Load::of(&limiter, &[("acme", 1, 0)]).await;
    let (addr, asked, named) = with_neighbour(&limiter).await;
    let site = format!("http://evil.example:{}/elsewhere", addr.port());
    browse(&site, async |page| {
        let tries = "const change = { method: 'POST', headers: { 'content-type': 'application/json', 'x-tower-tenant': '1' },
                body: JSON.stringify({ tenant: { name: 'acme' } }) };
            const look = (path, init) => fetch('/ops/tenants' + path, init).then(async answer => [answer.status, await answer.text()]);
            return Promise.all([look('/'), look('/snapshot.json'), look('/pause', change)])";
        let answers = page.run(tries).await;
        for answer in answers.as_array().unwrap() {
            assert_eq!(answer[0], 403, "{answer}");
            let text = answer[1].as_str().unwrap();
            assert!(text.contains("evil.example") && text.contains("allow_host"), "{text}");
            assert!(!text.contains("acme"), "{text}");
        }
    })
    .await;
    assert_eq!(asked.load(Ordering::SeqCst), 3);
    assert_eq!(named.load(Ordering::SeqCst), 0, "no snapshot was made");
    assert_eq!(limiter.stats("acme").unwrap().limit, 4);
    load.end(&limiter).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_page_of_another_site_asks_for_is_no_work() {
    let limiter = limiter();
    let load = Load::of(&limiter, &[("acme", 1, 0)]).await;
    for other in ["evil.example", "127.0.0.1"] {
        let (site, ..) = with_neighbour(&limiter).await;
        let (addr, asked, named) = with_neighbour(&limiter).await;
        let view = format!("http://{addr}{MOUNT}");
        browse(&format!("http://{other}:{}/elsewhere", site.port()), async |page| {
            let tries = format!(
                "const view = {}, add = (kind, init) => document.body.append(Object.assign(document.createElement(kind), init));
                for (const path of ['/', '/snapshot.json', '/snapshot.json?search=a']) {{
                    fetch(view + path).catch(() => 0);
                    fetch(view + path, {{ mode: 'no-cors' }}).catch(() => 0);
                    for (const kind of ['img', 'script', 'iframe']) add(kind, {{ src: view + path }});
                    add('link', {{ rel: 'stylesheet', href: view + path }});
                }}
                add('iframe', {{ name: 'sink' }});
                for (const method of ['get', 'post']) {{
                    add('form', {{ action: view + '/snapshot.json', method, target: 'sink' }});
                    document.body.lastChild.submit();
                }}
                add('form', {{ action: view + '/pause', method: 'post', enctype: 'text/plain', target: 'sink' }});
                document.body.lastChild.submit();",
                json!(view)
            );
            page.run(&tries).await;
            page.until(async || asked.load(Ordering::SeqCst) >= 12).await;
            tokio::time::sleep(Duration::from_millis(500)).await;
        })
        .await;
        println!(
            "{other}: {} requests reached the view",
            asked.load(Ordering::SeqCst)
        );
        assert_eq!(
            named.load(Ordering::SeqCst),
            0,
            "no snapshot was made for {other}"
        );
        assert_eq!(limiter.stats("acme").unwrap().limit, 4);
    }
    load.end(&limiter).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_of_another_site_leads_to_the_page() {
    let limiter = limiter();
    let load = Load::of(&limiter, &[("acme", 1, 0)]).await;
    let (site, ..) = with_neighbour(&limiter).await;
    let view = mount(view(&limiter)).await;
    browse(
        &format!("http://evil.example:{}/elsewhere", site.port()),
        async |page| {
            page.run(&format!("location.href = {}", json!(view))).await;
            page.until_eq(NAMES, json!(["acme"])).await;
        },
    )
    .await;
    load.end(&limiter).await;
}
