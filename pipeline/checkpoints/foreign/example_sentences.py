"""A sentence in each of many languages, for the examples of model cards.

The first sentence of article 1 of the Universal Declaration of Human Rights, in the translations
that the United Nations publish. The languages stand in the order in which a model card prefers
them where nothing is known of a model's training text.
"""

from pipeline.languages import without_region

SENTENCES = {
    "en": "All human beings are born free and equal in dignity and rights.",
    "de": "Alle Menschen sind frei und gleich an Würde und Rechten geboren.",
    "fr": "Tous les êtres humains naissent libres et égaux en dignité et en droits.",
    "es": "Todos los seres humanos nacen libres e iguales en dignidad y derechos.",
    "zh": "人人生而自由，在尊严和权利上一律平等。",
    "ru": "Все люди рождаются свободными и равными в своем достоинстве и правах.",
    "pt": "Todos os seres humanos nascem livres e iguais em dignidade e em direitos.",
    "it": "Tutti gli esseri umani nascono liberi ed eguali in dignità e diritti.",
    "ar": "يولد جميع الناس أحرارا متساوين في الكرامة والحقوق.",
    "hi": "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है।",
    "ja": "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。",
    "ko": "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.",
    "nl": "Alle mensen worden vrij en gelijk in waardigheid en rechten geboren.",
    "pl": "Wszyscy ludzie rodzą się wolni i równi pod względem swej godności i swych praw.",
    "tr": "Bütün insanlar hür, haysiyet ve haklar bakımından eşit doğarlar.",
    "vi": "Tất cả mọi người sinh ra đều được tự do và bình đẳng về nhân phẩm và quyền.",
    "id": "Semua orang dilahirkan merdeka dan mempunyai martabat dan hak-hak yang sama.",
    "uk": "Всі люди народжуються вільними і рівними у своїй гідності та правах.",
    "cs": "Všichni lidé rodí se svobodní a sobě rovní co do důstojnosti a práv.",
    "sv": "Alla människor är födda fria och lika i värde och rättigheter.",
    "da": "Alle mennesker er født frie og lige i værdighed og rettigheder.",
    "nb": "Alle mennesker er født frie og med samme menneskeverd og menneskerettigheter.",
    "no": "Alle mennesker er født frie og med samme menneskeverd og menneskerettigheter.",
    "fi": "Kaikki ihmiset syntyvät vapaina ja tasavertaisina arvoltaan ja oikeuksiltaan.",
    "el": "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια και τα δικαιώματα.",
    "hu": "Minden emberi lény szabadon születik és egyenlő méltósága és joga van.",
    "ro": "Toate ființele umane se nasc libere și egale în demnitate și în drepturi.",
    "fa": "تمام افراد بشر آزاد به دنیا می‌آیند و از لحاظ حیثیت و حقوق با هم برابرند.",
    "he": "כל בני האדם נולדו בני חורין ושווים בערכם ובזכויותיהם.",
    "th": "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ",
    "bg": "Всички хора се раждат свободни и равни по достойнство и права.",
    "ca": "Tots els éssers humans neixen lliures i iguals en dignitat i en drets.",
    "zh_Hant": "人人生而自由，在尊嚴和權利上一律平等。",
    "sw": "Watu wote wamezaliwa huru, hadhi na haki zao ni sawa.",
}
_RANKS = {code: rank for rank, code in enumerate(SENTENCES)}


def sentence_in(code: str) -> str | None:
    """Return a sentence in a language of a model; None if there is none here."""
    return SENTENCES.get(code) or SENTENCES.get(without_region(code))


def prominence(code: str) -> tuple[int, str]:
    """Return a key that sorts languages in the order of ``SENTENCES``, and others behind them."""
    return _RANKS.get(without_region(code), len(_RANKS)), code
