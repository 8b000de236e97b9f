package evernear;

import java.io.PrintStream;
import java.util.List;
import java.util.regex.Pattern;
import org.apache.logging.log4j.core.LogEvent;
import org.apache.logging.log4j.core.config.Configuration;
import org.apache.logging.log4j.core.config.plugins.Plugin;
import org.apache.logging.log4j.core.layout.PatternLayout;
import org.apache.logging.log4j.core.pattern.ConverterKeys;
import org.apache.logging.log4j.core.pattern.LogEventPatternConverter;
import org.apache.logging.log4j.core.pattern.PatternConverter;
import org.apache.logging.log4j.core.pattern.PatternFormatter;

/**
 * Masks the environment's secrets in the logs and the output of the server and its workers.
 *
 * <p>evernear/common/masking.py identifies secrets, and lists their forms in a variable of the server, one per line. In
 * log4j2.xml, <code>%masked{...}</code> encloses a whole line and its stack trace.
 */
@Plugin(name = "Masking", category = PatternConverter.CATEGORY)
@ConverterKeys("masked")
public final class Masking extends LogEventPatternConverter {
    private static final String MASK = "***";
    private static final String[] SECRETS = secrets(System.getenv("_EVERNEAR_SECRETS"));
    private static final Pattern LOGIN = Pattern.compile("(?<=://)[^/?#\\s@\"'<>\\\\]+(?=@)");
    private static final Pattern TOKEN = Pattern.compile("(?i)(?<=bearer )[\\w.~+/=-]{8,}");

    private final List<PatternFormatter> line;

    private Masking(List<PatternFormatter> line) {
        super("masked", "masked");
        this.line = line;
    }

    /** Called by log4j: the first option is the pattern of the line. */
    public static Masking newInstance(Configuration configuration, String[] options) {
        return new Masking(PatternLayout.createPatternParser(configuration).parse(options[0]));
    }

    /** Masks the output to stdout and stderr from now on, such as the stack trace of a startup error. */
    static void install() {
        System.setOut(new MaskedStream(System.out));
        System.setErr(new MaskedStream(System.err));
    }

    static String mask(String text) {
        for (String secret : SECRETS) {
            text = text.replace(secret, MASK);
        }
        return TOKEN.matcher(LOGIN.matcher(text).replaceAll(MASK)).replaceAll(MASK);
    }

    @Override
    public void format(LogEvent event, StringBuilder output) {
        StringBuilder text = new StringBuilder();
        line.forEach(formatter -> formatter.format(event, text));
        output.append(mask(text.toString()));
    }

    /** Without this method, log4j would write the stack trace a second time. */
    @Override
    public boolean handlesThrowable() {
        return true;
    }

    private static String[] secrets(String variable) {
        return variable == null || variable.isEmpty() ? new String[0] : variable.split("\n");
    }

    private static final class MaskedStream extends PrintStream {
        MaskedStream(PrintStream stream) {
            super(stream, true);
        }

        @Override
        public void print(String text) {
            super.print(mask(String.valueOf(text)));
        }
    }
}
